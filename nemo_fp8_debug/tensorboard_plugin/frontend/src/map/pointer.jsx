// The map for the pointer: what is under it is told, a click chooses it.
import {useSignal} from '@preact/signals';
import {useRef} from 'preact/hooks';
import {go, toTensor} from '../address.js';
import {titleOf, withUnit} from '../units.js';

export function Pointed({values, unit, children}) {
  const under = useSignal(null);
  const chart = useRef();
  const found = (event) => {
    const [column, row] = chart.current.convertFromPixel({gridIndex: 0}, [event.offsetX, event.offsetY]);
    return chart.current.containPixel({gridIndex: 0}, [event.offsetX, event.offsetY]) ? values.find((one) => one.column === column && one.row === row) : undefined;
  };
  const move = (event) => {
    const one = event.target.tagName === 'CANVAS' ? found(event) : undefined;
    under.value = one ? {one, x: event.offsetX, y: event.offsetY} : null;
  };
  const open = (event) => {
    const one = event.target.tagName === 'CANVAS' && found(event);
    if (one) go(toTensor(one.tensor));
  };
  return (
    <div class="pointed" onMouseMove={move} onMouseLeave={() => (under.value = null)} onClick={open}>
      {children((made) => (chart.current = made))}
      {under.value && <Under {...under.value} unit={unit} />}
    </div>
  );
}

function Under({one, x, y, unit}) {
  return (
    <div class="under" style={{left: `${x}px`, top: `${y}px`}}>
      <b>{titleOf(one.tensor)}</b><br />{withUnit(one.value, unit)}
      {one.tensors.length > 1 && <><br />the worst of {one.tensors.length} in this place</>}
    </div>
  );
}
