// What compare says of a good run, a bad one and the bad one's twin.
import {TensorLink} from '../components/link.jsx';
import {DifferencesTable} from '../components/settings.jsx';
import {Table} from '../components/table.jsx';
import {titleOf} from '../units.js';

const TOP = 15;

/** @param {object} names of the runs by part: good, bad, twin */
export function Compared({found, names}) {
  const {unit} = found;
  return (
    <section aria-label="Comparison">
      <h2>What sets it apart from {names.good}</h2>
      <p class="verdict">{found.verdict}</p>
      {found.notes.map((note) => <p key={note} class="soft">{note}</p>)}
      <Losses runs={found.runs} names={names} unit={unit} />
      {found.left.length > 0 && <Order left={found.left} unit={unit} run={names.bad} />}
      <Ranking tensors={found.tensors} unit={unit} names={names} />
      <Groups groups={found.groups} unit={unit} run={names.bad} />
      <h3>Differences of the settings</h3>
      <DifferencesTable differences={found.differences} names={[names.good, names.bad]} />
    </section>
  );
}

const loss = (value) => (value == null ? '-' : String(Number(value.toPrecision(4))));

function Losses({runs, names, unit}) {
  const rows = Object.entries(runs).map(([part, run]) => ({part, name: names[part], ...run}));
  const columns = [
    {label: 'run', of: (row) => row.part, text: true},
    {label: 'record', of: (row) => row.name, text: true},
    {label: 'lowest loss', of: (row) => row.lowest_loss?.[1], show: (row) => loss(row.lowest_loss?.[1])},
    {label: `at ${unit}`, of: (row) => row.lowest_loss?.[0]},
    {label: 'final loss', of: (row) => row.final_loss, show: (row) => loss(row.final_loss)},
    {label: `rises for good from ${unit}`, of: (row) => row.diverged_at},
    {label: `above the good run from ${unit}`, of: (row) => row.above_good_since},
  ];
  return <><h3>Loss</h3><Table name="losses" caption="Medians over a sixth of the run" columns={columns} rows={rows} /></>;
}

const TENSOR = {label: 'tensor', of: titleOf, text: true, show: (row) => <TensorLink {...row} step={row.onset} />};

function Order({left, unit, run}) {
  const columns = [
    {label: `from ${unit}`, of: (row) => row.onset},
    {label: `${unit}s before the loss`, of: (row) => row.lead},
    TENSOR,
    {label: 'figure', of: (row) => row.figure, text: true},
    {label: 'expected', of: (row) => row.expected},
    {label: 'found', of: (row) => row.value},
    {label: 'times the least that counts', of: (row) => row.excess},
  ];
  return (
    <>
      <h3>Order in which tensors leave the good run's band</h3>
      <Table name={`onsets of ${run}`} caption="Each tensor and figure at the first step from which it stays out" columns={columns} rows={left} first={TOP} />
    </>
  );
}

function Ranking({tensors, unit, names}) {
  const pair = (label, figure) => ({label, from: (row) => row[`${figure}_good`], of: (row) => row[`${figure}_bad`]});
  const columns = [
    TENSOR,
    {label: 'drift (log2)', of: (row) => row.drift_log2},
    {label: 'MSE ratio', of: (row) => row.mse_ratio},
    pair('underflow (%)', 'underflow_pct'),
    pair('overflow (%)', 'overflow_pct'),
    pair('relative error', 'relative_error'),
    pair('amax', 'amax'),
    {label: `leaves from ${unit}`, of: (row) => row.onset},
  ];
  const caption = `${names.good} → ${names.bad}, medians over the later half. Drift: log2 of how many times worse FP8 holds a tensor; 1 is twice, 0 is the same`;
  return (
    <>
      <h3>Tensors by drift</h3>
      <Table name={`drift of ${names.bad}`} caption={caption} columns={columns} rows={tensors} first={TOP} />
    </>
  );
}

function Groups({groups, unit, run}) {
  const columns = [
    {label: 'by', of: (row) => row.by, text: true},
    {label: 'group', of: (row) => row.group, text: true},
    {label: 'tensors', of: (row) => row.tensors},
    {label: 'that left', of: (row) => row.left},
    {label: `the first from ${unit}`, of: (row) => row.onset},
    {label: 'median drift (log2)', of: (row) => row.drift_log2},
  ];
  return <><h3>Where they are</h3><Table name={`groups of ${run}`} caption="Tensors by kind, depth and role" columns={columns} rows={groups} first={TOP} /></>;
}
