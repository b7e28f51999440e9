// The metrics of a tensor under the cast in use and under the cast to try, side by side.
import '@preact/signals';
import {saveCsv} from '../download.js';
import {metricNamed} from '../records.js';
import {precise, withUnit} from '../units.js';

const SHOWN = ['underflow_pct', 'overflow_pct', 'mse', 'relative_error', 'sqnr_db', 'cosine'];

function verdict(before, now, worse) {
  if (before == null || now == null) return '';
  if (Math.abs(now - before) <= 1e-9 * Math.abs(before)) return 'same';
  return (now > before) === worse > 0 ? 'worse' : 'better';
}

const said = (value, unit) => (value === Infinity ? 'nothing lost' : withUnit(value, unit, precise));

/** @param {?object} recorded recorded metrics, shown for the cast in use if no scale of the whole tensor is known */
export function Metrics({title, inUse, tried, recorded}) {
  const used = inUse.metrics ?? recorded ?? {};
  const rows = SHOWN.map((name) => ({name, worse: 1, label: name, unit: '', ...metricNamed(name)}));
  const table = () => [
    ['metric', 'unit', 'in use', 'tried'], ...rows.map(({name, unit}) => [name, unit, used[name], tried.metrics?.[name]]),
    ['format', '', inUse.name, tried.name], ['scale', '', inUse.scale, tried.scale],
  ];
  return (
    <div class="wide">
      <table data-table="metrics">
        <caption>
          {title} <button type="button" onClick={() => saveCsv(`metrics of ${title}`, table())}>CSV</button>
        </caption>
        <thead>
          <tr><th scope="col">Metric</th><Heading cut={inUse} label="in use" /><Heading cut={tried} label="tried" /><th scope="col">tried is</th></tr>
        </thead>
        <tbody>
          {rows.map(({name, label, unit, worse}) => (
            <tr key={name}>
              <th scope="row">{label}</th>
              <Cell name={name} of="in use" value={used[name]} unit={unit} />
              <Cell name={name} of="tried" value={tried.metrics?.[name]} unit={unit} />
              <td>{verdict(used[name], tried.metrics?.[name], worse)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {!inUse.metrics && recorded && (
        <p class="soft">The recipe in use has no single scale for the tensor, so we show its recorded metrics and no window.</p>
      )}
    </div>
  );
}

const Heading = ({cut, label}) => (
  <th scope="col" class="n">{label}<br /><span class="soft">{cut.name?.toUpperCase()}{cut.scale !== null && `, scale ${precise(cut.scale)}`}</span></th>
);

const Cell = ({name, of, value, unit}) => (
  <td class="n" data-metric={name} data-of={of} data-value={value}>{said(value, unit)}</td>
);
