// The result of `compare` for the baseline, the run and the reference run.
import {DifferencesTable} from '../components/settings.jsx';
import {Table} from '../components/table.jsx';
import {metricNamed} from '../records.js';
import {TensorLink} from '../story/link.jsx';
import {inUnit, number, titleOf, withUnit} from '../units.js';

const TOP = 15;

/** @param {object} names names of the runs by part: baseline, run, reference */
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
      <h3>Settings that differ</h3>
      <DifferencesTable differences={found.differences} names={[names.baseline, names.run]} />
    </section>
  );
}

const loss = (value) => number(value, 4);

function Losses({runs, names, unit}) {
  const rows = Object.entries(runs).map(([part, run]) => ({part, name: names[part], ...run}));
  const columns = [
    {label: 'run', of: (row) => row.part, text: true},
    {label: 'record', of: (row) => row.name, text: true},
    {label: 'lowest loss', of: (row) => row.lowest_loss?.[1], show: (row) => loss(row.lowest_loss?.[1])},
    {label: `at ${unit}`, of: (row) => row.lowest_loss?.[0]},
    {label: 'final loss', of: (row) => row.final_loss, show: (row) => loss(row.final_loss)},
    {label: `rises to the end from ${unit}`, of: (row) => row.diverged_at},
    {label: `above the baseline from ${unit}`, of: (row) => row.above_baseline_since},
  ];
  return <><h3>Loss</h3><Table name="losses" caption="Medians over a sixth of the run" columns={columns} rows={rows} /></>;
}

const TENSOR = {label: 'tensor', of: titleOf, text: true, show: (row) => <TensorLink {...row} step={row.onset} />};

/** Return a column of values, each shown in its own unit. */
const inTheUnit = (label, of, unitOf) => ({label, of: (row) => inUnit(of(row), unitOf(row)), show: (row) => withUnit(of(row), unitOf(row))});

const driftAs = (label) => inTheUnit(label, (row) => row.drift_log2, () => 'log2');

function headingOf(metric) {
  const {label, unit} = metricNamed(metric);
  return unit ? `${label} (${unit})` : label;
}

function Order({rows, unit, run}) {
  const columns = [
    {label: `from ${unit}`, of: (row) => row.onset},
    {label: `${unit}s before the loss`, of: (row) => row.lead},
    TENSOR,
    {label: 'metric', of: (row) => metricNamed(row.metric).label, text: true},
    inTheUnit('expected', (row) => row.expected, (row) => metricNamed(row.metric).unit),
    inTheUnit('found', (row) => row.value, (row) => metricNamed(row.metric).unit),
    {label: 'x threshold', of: (row) => row.excess},
  ];
  return (
    <>
      <h3>Order in which tensors leave the baseline's band</h3>
      <Table name={`onsets of ${run}`} caption="Each tensor and metric, at the first step out of band" columns={columns} rows={rows} first={TOP} />
    </>
  );
}

function Ranking({tensors, unit, names}) {
  const pair = (metric) => ({label: headingOf(metric), from: (row) => row[`${metric}_baseline`], of: (row) => row[`${metric}_run`]});
  const columns = [
    TENSOR,
    driftAs('drift'),
    {label: 'MSE ratio', of: (row) => row.mse_ratio},
    ...['underflow_pct', 'overflow_pct', 'relative_error', 'amax'].map(pair),
    {label: `out of band from ${unit}`, of: (row) => row.onset},
  ];
  const caption = `In the order of the verdict; ${names.baseline} → ${names.run}, medians over the later half. Drift: factor by which the FP8 error grew; x1 is no change`;
  return (
    <>
      <h3>Tensors by harm</h3>
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
    driftAs('median drift'),
  ];
  return <><h3>Where they are</h3><Table name={`groups of ${run}`} caption="Tensors by kind, depth and role" columns={columns} rows={groups} first={TOP} /></>;
}
