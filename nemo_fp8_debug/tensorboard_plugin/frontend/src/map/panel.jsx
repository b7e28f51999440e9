// One map: a run's metric at a step, or what sets two runs apart.
import {titleOf, withUnit} from '../units.js';
import {cells} from './cells.js';
import {Keyed} from './keyboard.jsx';
import {Picture} from './picture.jsx';
import {Pointed} from './pointer.jsx';
import {worstOf} from './values.js';

const ROW_PX = 20;
const [LEAST_PX, MOST_PX] = [150, 860];

/**
 * @param {string} name of the panel: run, baseline, reference or difference
 * @param {string} title
 * @param {number} step of the sample
 * @param {Array} values as of `valuesOf`
 * @param {object} scale as of `scaleOf`
 * @param {function} badness of a value, more for worse
 */
export function Panel({name, title, step, values, scale, unit, badness}) {
  const worst = worstOf(values, badness);
  const {rows} = cells.value;
  const height = Math.min(MOST_PX, Math.max(LEAST_PX, rows.length * ROW_PX)) + 130;
  const described = worst ? `worst is ${titleOf(worst.tensor)} with ${withUnit(worst.value, unit)}` : 'no values';
  return (
    <section class="panel" data-panel={name} data-layer={worst?.tensor.layer} data-role={worst?.tensor.role} data-value={worst?.value}>
      <h3>{title}</h3>
      <p class="soft">{worst ? <>Worst: <b>{titleOf(worst.tensor)}</b>, {withUnit(worst.value, unit)}</> : 'No values at this step.'}</p>
      <Keyed values={values} unit={unit} label={`${title}: ${described}. Arrow keys move over the map, Enter opens the timeline.`}>
        <Pointed values={values} unit={unit}>
          {(ready) => (
            <Picture
              name={`map-${name}-step-${step}`} label={`${title}: ${described}`} height={height} mark={step} ready={ready}
              values={values} scale={scale} rows={() => table(values, unit)}
            />
          )}
        </Pointed>
      </Keyed>
    </section>
  );
}

// Of several in a place the worst.
const table = (values, unit) => [['layer', 'role', `value (${unit || '1'})`], ...values.map(({tensor: {layer, role}, value}) => [layer, role, value])];
