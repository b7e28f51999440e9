// Which figures are looked at over the steps.
import '@preact/signals';
import {at, go} from '../address.js';
import {figureNamed, known} from '../records.js';

const DEFAULT = 'underflow_pct,relative_error,amax,scale_ratio_log2';

/** What a run tells of its steps, sampled or not; sparse: of some of them only. */
const OF_THE_RUN = {
  loss: {label: 'loss', unit: '', scale: 'linear'},
  grad_norm: {label: 'gradient norm', unit: '', scale: 'log', sparse: true},
  lr: {label: 'learning rate', unit: '', scale: 'linear', sparse: true},
};

export const ofTheRun = (name) => name in OF_THE_RUN;
export const aboutFigure = (name) => OF_THE_RUN[name] ?? figureNamed(name);

const offered = () => [...known.value.figures.map(({name}) => name), 'grad_norm', 'lr'];

/** Names of figures, as the address has them, in the order that they are offered in. */
export function chosenFigures() {
  const wanted = new Set((at('figures') ?? DEFAULT).split(','));
  return offered().filter((name) => wanted.has(name));
}

export function Figures({figures}) {
  const set = (name, on) => go({figures: offered().filter((one) => (one === name ? on : figures.includes(one))).join(',')});
  return (
    <details class="choices">
      <summary>{figures.length} figures: {figures.map((name) => aboutFigure(name).label).join(', ') || 'none'}</summary>
      <fieldset class="controls">
        <legend class="soft">Figures, each with a chart of its own</legend>
        {offered().map((name) => {
          const {label, unit} = aboutFigure(name);
          return (
            <label key={name}>
              <input type="checkbox" checked={figures.includes(name)} onChange={(event) => set(name, event.target.checked)} data-figure-choice={name} />
              {unit ? `${label} (${unit})` : label}
            </label>
          );
        })}
      </fieldset>
    </details>
  );
}
