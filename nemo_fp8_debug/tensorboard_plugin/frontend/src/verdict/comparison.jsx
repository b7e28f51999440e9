// What compare says of the baseline, the run and the reference run.
import {TensorLink} from '../story/link.jsx';
import {DifferencesTable} from '../components/settings.jsx';
import {Table} from '../components/table.jsx';
import {titleOf} from '../units.js';

const TOP = 15;

/** @param {object} names of the runs by part: baseline, run, reference */
export function Compared({found, names}) {
  const {unit} = found;
  return (
    <section aria-label="Comparison">
      <h2>{names.run} against {names.baseline}</h2>
      <p class="verdict">{found.verdict}</p>
      {found.notes.map((note) => <p key={note} class="soft">{note}</p>)}
      <Losses runs={found.runs} names={names} unit={unit} />
      {found.out_of_band.length > 0 && <Order rows={found.out_of_band} unit={unit} run={names.run} />}
      <Ranking tensors={found.tensors} unit={unit} names={names} />
      <Groups groups={found.groups} unit={unit} run={names.run} />
      <h3>Differences of the settings</h3>
      <DifferencesTable differences={found.differences} names={[names.baseline, names.run]} />
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
    {label: `above the baseline from ${unit}`, of: (row) => row.above_baseline_since},
  ];
  return <><h3>Loss</h3><Table name="losses" caption="Medians over a sixth of the run" columns={columns} rows={rows} /></>;
}

const TENSOR = {label: 'tensor', of: titleOf, text: true, show: (row) => <TensorLink {...row} step={row.onset} />};

function Order({rows, unit, run}) {
  const columns = [
    {label: `from ${unit}`, of: (row) => row.onset},
    {label: `${unit}s before the loss`, of: (row) => row.lead},
    TENSOR,
    {label: 'metric', of: (row) => row.metric, text: true},
    {label: 'expected', of: (row) => row.expected},
    {label: 'found', of: (row) => row.value},
    {label: 'times the least that counts', of: (row) => row.excess},
  ];
  return (
    <>
      <h3>Order in which tensors leave the baseline's band</h3>
      <Table name={`onsets of ${run}`} caption="Each tensor and metric at the first step from which it stays out" columns={columns} rows={rows} first={TOP} />
    </>
  );
}

function Ranking({tensors, unit, names}) {
  const pair = (label, metric) => ({label, from: (row) => row[`${metric}_baseline`], of: (row) => row[`${metric}_run`]});
  const columns = [
    TENSOR,
    {label: 'drift (log2)', of: (row) => row.drift_log2},
    {label: 'MSE ratio', of: (row) => row.mse_ratio},
    pair('underflow (%)', 'underflow_pct'),
    pair('overflow (%)', 'overflow_pct'),
    pair('relative error', 'relative_error'),
    pair('amax', 'amax'),
    {label: `out of band from ${unit}`, of: (row) => row.onset},
  ];
  const caption = `${names.baseline} → ${names.run}, medians over the later half. Drift: log2 of how many times worse FP8 holds a tensor; 1 is twice, 0 is the same`;
  return (
    <>
      <h3>Tensors by drift</h3>
      <Table name={`drift of ${names.run}`} caption={caption} columns={columns} rows={tensors} first={TOP} />
    </>
  );
}

function Groups({groups, unit, run}) {
  const columns = [
    {label: 'by', of: (row) => row.by, text: true},
    {label: 'group', of: (row) => row.group, text: true},
    {label: 'tensors', of: (row) => row.tensors},
    {label: 'out of band', of: (row) => row.out_of_band},
    {label: `the first from ${unit}`, of: (row) => row.onset},
    {label: 'median drift (log2)', of: (row) => row.drift_log2},
  ];
  return <><h3>Where they are</h3><Table name={`groups of ${run}`} caption="Tensors by kind, depth and role" columns={columns} rows={groups} first={TOP} /></>;
}
