// The selected step: a slider over the sampled steps, with a button that plays them.
import {useSignal} from '@preact/signals';
import {useEffect} from 'preact/hooks';
import {go, step} from '../address.js';
import {steps} from '../details.js';
import {placeOf} from '../units.js';

const FRAME_MS = 250;

/** Return the sampled step nearest to the selected step, or null without samples. */
export const currentStep = () => (steps.value.length ? steps.value[step.value === null ? steps.value.length - 1 : placeOf(steps.value, step.value)] : null);

/** The slider and its buttons. */
export function Steps() {
  const playing = useSignal(false);
  const last = steps.value.length - 1;
  const place = steps.value.indexOf(currentStep());
  const move = (to) => go({step: steps.value[Math.max(0, Math.min(last, to))]});

  useEffect(() => {
    if (!playing.value) return undefined;
    if (place >= last) {
      playing.value = false;
      return undefined;
    }
    const timer = setTimeout(() => move(place + 1), FRAME_MS);
    return () => clearTimeout(timer);
  }, [playing.value, place, last]);

  const play = () => {
    if (!playing.value && place >= last) move(0);
    playing.value = !playing.value;
  };

  return (
    <div class="steps">
      <button type="button" onClick={play} aria-label={playing.value ? 'Stop' : 'Play through the steps'} disabled={last < 1}>
        {playing.value ? '■' : '▶'}
      </button>
      <button type="button" onClick={() => move(place - 1)} aria-label="Sampled step before" disabled={place <= 0}>‹</button>
      <input
        type="range" min="0" max={Math.max(0, last)} value={place} aria-label="Step" aria-valuetext={`step ${steps.value[place]}`}
        onInput={(event) => move(Number(event.target.value))}
      />
      <button type="button" onClick={() => move(place + 1)} aria-label="Next sampled step" disabled={place >= last}>›</button>
      <output>step {steps.value[place] ?? '-'}</output>
    </div>
  );
}
