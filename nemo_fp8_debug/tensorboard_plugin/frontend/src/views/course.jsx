// A picture of layers by steps. It shows when and where a problem began, and whether it spread.
import {useMemo} from 'preact/hooks';
import {at, go, tensor} from '../address.js';
import {asMultiple, badnessOf, limitsOfMultiples, limitsSet, scaleOf, scaleOfMultiples, tallyOf} from '../color/scales.js';
import {Legend} from '../color/legend.jsx';
import {Notice, Problem, Typed} from '../components/basics.jsx';
import {currentMetric, Metric, Table as Tables} from '../components/pickers.jsx';
import {currentStep} from '../components/steps.jsx';
import {Table} from '../components/table.jsx';
import {CourseChart} from '../course/chart.jsx';
import {currentlyShown, isAgainst, linesOf, multiplesOf, offered, ranked, useCourse, useMarks} from '../course/data.js';
import {stepsFromTo} from '../details.js';
import {chosen, metricNamed} from '../records.js';
import {AlsoShow, dataOf, isAwaited, Problems, useRuns} from '../runs/also.jsx';
import {shownRuns} from '../runs/beside.js';
import {Card} from '../story/card.jsx';
import {TensorLink} from '../story/link.jsx';
import {dark} from '../theme.js';
import {number, titleOf, withUnit} from '../units.js';
import {LIMITS} from '../what_if/rows.js';

const LISTED = 12;

const asStep = (text) => (/^\d{1,15}$/.test(text ?? '') ? Number(text) : null);

/** Return the range of steps [from, to] in the address. Timeline has the same range. */
function spanOf([first, last]) {
  const [from, to] = [asStep(at('from')) ?? first, asStep(at('to')) ?? last];
  return from < to ? [from, to] : [first, last];
}

export function Course() {
  const ends = stepsFromTo.value;
  return ends ? <CourseOf ends={ends} span={spanOf(ends)} /> : <p class="soft" role="status">Reading the record …</p>;
}

function CourseOf({ends, span}) {
  const metric = metricNamed(currentMetric());
  const shown = currentlyShown();
  const {data, error} = useCourse(metric, shown, span);
  const losses = useRuns((run) => ['loss', {run}]);
  const marks = useMarks();
  return (
    <>
      <div class="controls">
        <Tables /><Metric />
        <label>
          Show
          <select value={shown} onChange={(event) => go({show: event.target.value})} data-picker="show">
            {Object.entries(offered()).map(([name, label]) => <option key={name} value={name}>{label}</option>)}
          </select>
        </label>
        <Span ends={ends} span={span} />
      </div>
      <AlsoShow />
      <Problems answers={[losses]} />
      {error && <Problem error={error} />}
      {data && isRead(losses) ? <Shown {...data} data={data} losses={dataOf(losses)} marks={marks} span={span} /> : !error && <p class="soft" role="status">Reading all steps of the record …</p>}
    </>
  );
}

/** Return whether the lines of some run have arrived, or no answer is awaited. Lines of other runs may arrive later. */
const isRead = (losses) => Object.values(losses).some(({data}) => data) || !isAwaited(losses);

/** Fields for the range of steps, for users who cannot drag. */
function Span({ends: [first, last], span: [from, to]}) {
  const set = (low, high) => low < high && go({from: low <= first ? null : low, to: high >= last ? null : high}, true);
  return (
    <span class="span">
      <label>Steps from <Typed type="number" min={first} max={last} value={from} onChange={(event) => set(event.target.valueAsNumber, to)} data-zoom="from" /></label>
      <label>to <Typed type="number" min={first} max={last} value={to} onChange={(event) => set(from, event.target.valueAsNumber)} data-zoom="to" /></label>
      <button type="button" disabled={from <= first && to >= last} onClick={() => set(first, last)}>All steps</button>
    </span>
  );
}

function Shown({metric, shown, title, data, losses, marks, span}) {
  const against = isAgainst(shown);
  const badness = badnessOf(metric);
  const choice = against ? 'course' : 'all';
  const distribution = useMemo(() => settled(data), [data]);
  const automatic = useMemo(() => (against ? limitsOfMultiples([distribution.most]) : data.robust), [data]);
  const set = limitsSet(metric, choice);
  const limits = set ?? automatic;
  const scale = useMemo(() => (against ? scaleOfMultiples : scaleOf)(metric, limits), [metric, limits.join(), against, dark.value]);
  const multiples = useMemo(() => multiplesOf(data.course), [data.course]);
  const [from, to] = span;
  const lines = useMemo(() => linesOf(losses, span), [from, to, ...Object.values(losses)]);
  const counting = against ? [-1, 1] : LIMITS[metric.name] ? [LIMITS[metric.name]] : [];
  const rows = useMemo(() => ranked(data, badness, against ? 1 : LIMITS[metric.name] ?? Infinity), [data]);
  const label = `${title}: ${metric.label}${metric.unit && !against ? ` (${metric.unit})` : ''}`;
  const tell = (cell) => `${withUnit(cell.value, metric.unit)}${against ? `, ${asMultiple(cell.number)}` : ''}, ${stepsOf(cell)}`;
  if (!data.course.layer.length) return <Notice><p>Nothing was sampled in these steps.</p></Notice>;
  const farthest = rows[0];
  return (
    <>
      <div class="legends"><Legend metric={metric} choice={choice} scale={scale} label={label} automatic={automatic} set={Boolean(set)} distribution={distribution} counting={counting} note={noteOf(against)} show={against ? asMultiple : undefined} /></div>
      <CourseChart
        key={`${multiples.length} ${lines.length}`} data={data} multiples={multiples} lines={lines} marks={marks} span={span} scale={scale} badness={badness} names={shownRuns.value}
        tell={tell} step={currentStep()} mark={`${metric.name} ${shown} ${span.join(' ')}`} rows={() => csvOf(data)}
        label={`${label}, layers down and steps ${from} to ${to} across. ${farthest ? `Farthest: ${titleOf(farthest)} at step ${farthest.step}.` : ''}`}
      />
      <p class="soft">Click a cell for its tensor and step; drag across to zoom.</p>
      {tensor.value && <Card {...tensor.value} inLine />}
      <Table name={`course of ${metric.name}`} caption={`The farthest of ${rows.length} tensors, each at its worst step, without the warm-up`} columns={columnsOf(metric, against)} rows={rows} first={LISTED} />
    </>
  );
}

const stepsOf = ({step, last, samples}) => (samples > 1 ? `the worst of ${samples} samples, steps ${step} to ${last}` : `step ${step}`);

const noteOf = (against) => `${against ? `Multiples of the threshold, which is above the moves of ${chosen.value.baseline} itself.` : 'From the 1st to the 99th percentile.'} The warm-up, the first tenth of the samples, is left out and faint.`;

/** Return the distribution of the numbers that colors show, without the warm-up. */
function settled({course, numbers, warmUp}) {
  const width = course.first.length;
  const begin = course.first.findIndex((step) => step > warmUp);
  return tallyOf(numbers, width, Math.max(0, begin));
}

const columnsOf = (metric, against) => [
  {label: 'tensor', of: titleOf, text: true, show: (row) => <TensorLink {...row} />},
  {label: metric.unit ? `${metric.label} (${metric.unit})` : metric.label, of: (row) => row.value, show: (row) => number(row.value)},
  ...(against ? [{label: 'x threshold', of: (row) => row.number, show: (row) => number(row.number)}] : []),
  {label: 'at step', of: (row) => row.step},
  {label: 'above threshold from step', of: (row) => row.since},
];

function csvOf({course, numbers}) {
  const width = course.first.length;
  return [['layer', 'role', ...course.first.map((step) => `step ${step}`)], ...course.layer.map((layer, i) => [layer, course.role[i], ...numbers.subarray(i * width, (i + 1) * width)])];
}
