// The tensors that matter, those first that the verdict rests on, and why each is blamed or is not.
import {TensorLink} from './link.jsx';
import {Table} from '../components/table.jsx';
import {titleOf} from '../units.js';

const FIRST = 8;

export function Tensors({tensors, unit, run}) {
  const value = (metric) => (row) => row.values[metric].run;
  const before = (metric) => (row) => row.values[metric].baseline;
  const paired = tensors.some((row) => row.values.relative_error.baseline != null);
  const metric = (label, name) => ({label, of: value(name), ...(paired && {from: before(name)})});
  const zero = (row) => (row.zero_since == null ? undefined : `all values are zero since ${unit} ${row.zero_since}`);
  const columns = [
    {label: 'rank', of: (row) => row.harm_rank},
    {label: 'tensor', of: titleOf, text: true, show: (row) => <TensorLink {...row} step={row.since} />},
    {label: `since ${unit}`, of: (row) => row.since},
    {label: 'why', of: (row) => row.why, text: true},
    {...metric('relative error', 'relative_error'), show: zero},
    metric('underflow (%)', 'underflow_pct'),
    {label: 'rank by error', of: (row) => row.error_rank},
  ];
  return (
    <section aria-label="Tensors that matter">
      <h2>The tensors that matter</h2>
      <Table
        name={`tensors of ${run}`} caption={`Blamed first, then what else was wrong, then consequences in order; ${paired ? 'baseline → run, ' : ''}medians over the later half`}
        columns={columns} rows={tensors} first={FIRST} rowClass={(row) => (row.blamed || row.also_wrong ? 'telling' : '')}
      />
    </section>
  );
}
