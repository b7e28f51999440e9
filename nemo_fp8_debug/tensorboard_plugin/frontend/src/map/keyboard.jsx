// The map for the keyboard: arrows choose a tensor, Enter opens its timeline.
import {useRef} from 'preact/hooks';
import {go, toTensor} from '../address.js';
import {titleOf} from '../units.js';
import {isChosen} from './values.js';

const MOVES = {ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0]};

export function Keyed({values, tell, label, children}) {
  const box = useRef();
  const now = values.find(isChosen);
  const keys = (event) => {
    if (event.target !== box.current) return;
    if (event.key === 'Enter' && now) go({view: 'timeline'}, true);
    const by = MOVES[event.key];
    if (!by) return;
    event.preventDefault();
    const next = now ? nearest(values, now, by) : values[0];
    if (next) go(toTensor(next.tensor));
  };
  return (
    <div ref={box} class="keyed" tabIndex={0} role="group" aria-label={label} onKeyDown={keys}>
      {children}
      <span class="unseen" aria-live="polite">{now ? `${titleOf(now.tensor)}: ${tell(now)}` : ''}</span>
    </div>
  );
}

/** The next cell in a direction. */
function nearest(values, from, [right, down]) {
  const ahead = values.filter((one) => (right ? one.row === from.row && Math.sign(one.column - from.column) === right : one.column === from.column && Math.sign(one.row - from.row) === down));
  const far = (one) => Math.abs(one.column - from.column) + Math.abs(one.row - from.row);
  return ahead.reduce((best, one) => (!best || far(one) < far(best) ? one : best), null);
}
