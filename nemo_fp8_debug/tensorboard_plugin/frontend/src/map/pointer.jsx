// The map for the pointer: what is under it is told, a click chooses it.
import {useSignal} from '@preact/signals';
import {useRef} from 'preact/hooks';
import {go, toTensor} from '../address.js';
import {titleOf} from '../units.js';

/** @param {function} tell a place's value in words */
export function Pointed({values, tell, children}) {
  const under = useSignal(null);
  const chart = useRef();
  const placeOf = (event) => {
    const where = [event.offsetX, event.offsetY];
    if (event.target.tagName !== 'CANVAS' || !chart.current.containPixel({gridIndex: 0}, where)) return null;
    const [column, row] = chart.current.convertFromPixel({gridIndex: 0}, where);
    return {column, row, x: where[0], y: where[1], width: chart.current.getWidth()};
  };
  // Where the pointer is, not what was there: that changes with the step and the metric.
  const found = (place) => place && values.find((one) => one.column === place.column && one.row === place.row);
  const open = (event) => {
    const one = found(placeOf(event));
    if (one) go(toTensor(one.tensor));
  };
  const now = found(under.value);
  return (
    <div class="pointed" onMouseMove={(event) => (under.value = placeOf(event))} onMouseLeave={() => (under.value = null)} onClick={open}>
      {children((made) => (chart.current = made))}
      {now && <Under {...under.value}><b>{titleOf(now.tensor)}</b><br />{tell(now)}{now.tensors.length > 1 && <><br />the worst of {now.tensors.length} in this place</>}</Under>}
    </div>
  );
}

/** A box beside the pointer, on the side that has more room. */
export function Under({x, y, width, children}) {
  const right = x > width / 2;
  return <div class="under" style={{top: `${y + 14}px`, ...(right ? {right: `${width - x + 10}px`} : {left: `${x + 10}px`}), maxWidth: `min(24rem, ${(right ? x : width - x) - 12}px)`}}>{children}</div>;
}
