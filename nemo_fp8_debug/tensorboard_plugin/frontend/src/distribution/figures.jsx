// The figures of a tensor as it was cast and as it is tried, side by side.
import '@preact/signals';
import {saveCsv} from '../download.js';
import {figureNamed} from '../records.js';
import {precise, withUnit} from '../units.js';

const SHOWN = ['underflow_pct', 'overflow_pct', 'mse', 'relative_error', 'sqnr_db', 'cosine'];

function verdict(before, now, worse) {
  if (before == null || now == null) return '';
  if (Math.abs(now - before) <= 1e-9 * Math.abs(before)) return 'same';
  return (now > before) === worse > 0 ? 'worse' : 'better';
}

const said = (value, unit) => (value === Infinity ? 'nothing lost' : withUnit(value, unit, precise));

/** @param {?object} recorded the recorded figures, which stand for those in use where no scale of the whole tensor is known */
export function Figures({title, inUse, tried, recorded}) {
  const used = inUse.figures ?? recorded ?? {};
  const rows = SHOWN.map((name) => ({name, worse: 1, label: name, unit: '', ...figureNamed(name)}));
  const table = () => [
    ['figure', 'unit', 'in use', 'tried'], ...rows.map(({name, unit}) => [name, unit, used[name], tried.figures?.[name]]),
    ['format', '', inUse.name, tried.name], ['scale', '', inUse.scale, tried.scale],
  ];
  return (
    <div class="wide">
      <table data-table="figures">
        <caption>
          {title} <button type="button" onClick={() => saveCsv(`figures of ${title}`, table())}>CSV</button>
        </caption>
        <thead>
          <tr><th scope="col">Figure</th><Heading cut={inUse} label="in use" /><Heading cut={tried} label="tried" /><th scope="col">tried is</th></tr>
        </thead>
        <tbody>
          {rows.map(({name, label, unit, worse}) => (
            <tr key={name}>
              <th scope="row">{label}</th>
              <Cell name={name} of="in use" value={used[name]} unit={unit} />
              <Cell name={name} of="tried" value={tried.figures?.[name]} unit={unit} />
              <td>{verdict(used[name], tried.figures?.[name], worse)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {!inUse.figures && recorded && (
        <p class="soft">What was in use has no scale of the whole tensor, so its figures are the recorded ones and its window is not drawn.</p>
      )}
    </div>
  );
}

const Heading = ({cut, label}) => (
  <th scope="col" class="n">{label}<br /><span class="soft">{cut.name?.toUpperCase()}{cut.scale !== null && `, scale ${precise(cut.scale)}`}</span></th>
);

const Cell = ({name, of, value, unit}) => (
  <td class="n" data-figure={name} data-of={of} data-value={value}>{said(value, unit)}</td>
);
