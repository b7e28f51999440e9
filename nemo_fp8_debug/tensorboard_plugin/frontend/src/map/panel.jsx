// One map: a run's metric at a step, or what sets two runs apart.
import {asMultiple} from '../color/against.js';
import {number, titleOf, withUnit} from '../units.js';
import {cells} from './cells.js';
import {Keyed} from './keyboard.jsx';
import {heightOf, Picture} from './picture.jsx';
import {Pointed} from './pointer.jsx';
import {worstOf} from './values.js';

/**
 * @param {string} name of the panel: run, baseline, reference or difference
 * @param {string} title
 * @param {number} step of the sample
 * @param {Array} values as of `valuesOf`
 * @param {object} scale as of `scaleOf`
 * @param {function} badness of what is colored, more for worse
 * @param {boolean} multiples whether that is multiples of what counts
 * @param {function} show a value in words, without its unit
 */
export function Panel({name, title, step, values, scale, unit, badness, multiples = false, show = number}) {
  const worst = worstOf(values, badness);
  const {rows} = cells.value;
  const tell = ({value, number: times}) => `${withUnit(value, unit, show)}${multiples ? `, ${asMultiple(times)}` : ''}`;
  const most = multiples ? 'Farthest' : 'Worst';
  const described = worst ? `${most.toLowerCase()} is ${titleOf(worst.tensor)} with ${tell(worst)}` : 'no values';
  return (
    <section class="panel" data-panel={name} data-layer={worst?.tensor.layer} data-role={worst?.tensor.role} data-value={worst?.value}>
      <h3>{title}</h3>
      <p class="soft">{worst ? <>{most}: <b>{titleOf(worst.tensor)}</b>, {tell(worst)}</> : 'No values at this step.'}</p>
      <Keyed values={values} tell={tell} label={`${title}: ${described}. Arrow keys move over the map, Enter opens the timeline.`}>
        <Pointed values={values} tell={tell}>
          {(ready) => (
            <Picture
              name={`map-${name}-step-${step}`} label={`${title}: ${described}`} height={heightOf(rows.length)} mark={step} ready={ready}
              values={values} scale={scale} rows={() => table(values, unit, multiples)}
            />
          )}
        </Pointed>
      </Keyed>
    </section>
  );
}

// Of several in a place the worst.
const table = (values, unit, multiples) => [
  ['layer', 'role', `value (${unit || '1'})`, ...(multiples ? ['times what counts'] : [])],
  ...values.map(({tensor: {layer, role}, value, number: times}) => [layer, role, value, ...(multiples ? [times] : [])]),
];
