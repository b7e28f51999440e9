// The tensors with the worst values, with their numbers and links to other views.
import {go, toTensor} from '../address.js';
import {chosen} from '../records.js';
import {TensorLink} from '../story/link.jsx';
import {number, titleOf, withUnit} from '../units.js';

const LISTED = 10;

/**
 * @param {Array} ordered tensors, the worst first: {tensor, by: values by part, apart: difference, times: multiple of the
 *   threshold}
 * @param {?object} difference result of `differenceOf`
 * @param {boolean} multiples whether the order is by multiples of the threshold
 */
export function Worst({ordered, parts, unit, difference, multiples}) {
  const open = (view, tensor) => go(toTensor(tensor, {view}), true);
  return (
    <div class="wide">
      <table>
        <caption>The {Math.min(LISTED, ordered.length)} {multiples ? 'farthest' : 'worst'} of {ordered.length} tensors at this step</caption>
        <thead>
          <tr>
            <th scope="col">tensor</th>
            {parts.map((part) => <th key={part} scope="col" class="n">{chosen.value[part]}</th>)}
            {difference && <th scope="col" class="n">{difference.unit ? `${difference.label} (${difference.unit})` : difference.label}</th>}
            {multiples && <th scope="col" class="n">x threshold</th>}
            <th scope="col">see</th>
          </tr>
        </thead>
        <tbody>
          {ordered.slice(0, LISTED).map(({tensor, by, apart, times}) => (
            <tr key={titleOf(tensor)}>
              <th scope="row"><TensorLink {...tensor} /></th>
              {parts.map((part) => <td key={part} class="n">{withUnit(by[part], unit)}</td>)}
              {difference && <td class="n">{withUnit(apart, '', difference.show)}</td>}
              {multiples && <td class="n">{number(times)}</td>}
              <td>
                <button type="button" onClick={() => open('timeline', tensor)}>Timeline</button>{' '}
                <button type="button" onClick={() => open('distribution', tensor)}>Distribution</button>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
