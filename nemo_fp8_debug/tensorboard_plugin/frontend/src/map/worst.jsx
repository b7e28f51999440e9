// The tensors with the worst values, in numbers, with the ways from there.
import {go, toTensor} from '../address.js';
import {chosen} from '../records.js';
import {TensorLink} from '../story/link.jsx';
import {titleOf, withUnit} from '../units.js';

const LISTED = 10;

/** @param {Array} ordered of the worst first: {tensor, by: values by part, difference} */
export function Worst({ordered, parts, unit, difference}) {
  const open = (view, tensor) => go(toTensor(tensor, {view}), true);
  return (
    <div class="wide">
      <table>
        <caption>The {Math.min(LISTED, ordered.length)} worst of {ordered.length} tensors at this step</caption>
        <thead>
          <tr>
            <th scope="col">tensor</th>
            {parts.map((part) => <th key={part} scope="col" class="n">{chosen.value[part]}</th>)}
            {difference !== undefined && <th scope="col" class="n">{difference ? `difference (${difference})` : 'difference'}</th>}
            <th scope="col">see</th>
          </tr>
        </thead>
        <tbody>
          {ordered.slice(0, LISTED).map(({tensor, by, apart}) => (
            <tr key={titleOf(tensor)}>
              <th scope="row"><TensorLink {...tensor} /></th>
              {parts.map((part) => <td key={part} class="n">{withUnit(by[part], unit)}</td>)}
              {difference !== undefined && <td class="n">{withUnit(apart, '')}</td>}
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
