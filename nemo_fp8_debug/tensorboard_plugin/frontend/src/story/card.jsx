// The card of a tensor: its values in each run, since when it is out of band, and whether it matters. Links to tensors open
// it.
import '@preact/signals';
import {step as chosenStep, toTensor} from '../address.js';
import {Breakable, Link} from '../components/basics.jsx';
import {currentMetric} from '../components/pickers.jsx';
import {chosen, metricNamed, PARTS, versionOf} from '../records.js';
import {useAnswer, useAnswers} from '../server.js';
import {COLORS, dark, inks, STROKES} from '../theme.js';
import {markersOf} from '../timeline/happened.js';
import {placeOf, titleOf, withUnit} from '../units.js';
import {isTold, storyOf, useBand, useDivergence, whetherInBand, whyTold} from './judged.js';

// The number of ranks that a tensor's values come from, and the steps at which ranks were missing.
/** Return {step, ranks, missing} as columns over the samples of the run, or undefined if unknown. */
export function useRanks(tensor) {
  const {run} = chosen.value;
  const {data} = useAnswer('timeline', {run, ...tensor, metrics: 'ranks,ranks_missing'}, versionOf(run));
  return data && {step: data.step, ranks: data.metrics.ranks, missing: data.metrics.ranks_missing};
}

/** Return the steps at which ranks were missing. */
export const stepsMissing = (of) => of?.step.filter((_, i) => of.missing[i] > 0) ?? [];

/**
 * @param {string} layer the layer; if it stands for all experts, we count the parts of experts on ranks instead of ranks
 * @param {object} of result of `useRanks`
 */
export function Ranks({layer, of}) {
  const at = of && (chosenStep.value === null ? of.step.length - 1 : placeOf(of.step, chosenStep.value));
  if (of?.ranks[at] == null) return null;
  const [there, missing, lacking] = [of.ranks[at], of.missing[at] ?? 0, stepsMissing(of).length];
  return (
    <p class="soft" data-words="ranks">
      {layer.split('.').includes('*') ? 'parts of experts' : 'ranks'}: {there}{missing > 0 && <> of {there + missing}; <b class="blamed">{missing} missing</b></>}
      {lacking > 0 && ` at step ${of.step[at]} (some are missing at ${lacking} of ${of.step.length} samples)`}
    </p>
  );
}

// The files with dumped values of a tensor, if there are any.
export function Dumps({tensor}) {
  const {run} = chosen.value;
  const {data} = useAnswer('dumps', {run, ...tensor}, versionOf(run));
  if (!data?.count) return null;
  const left = data.count - data.files.length;
  return (
    <details class="dumps">
      <summary>Dump: {data.count} file{data.count === 1 ? '' : 's'} of its values in {run}</summary>
      <ul>
        {left > 0 && <li class="soft">{left} earlier ones, and:</li>}
        {data.files.map(({step, rank, name}) => <li key={name}>step {step}, rank {rank}: <code>{name}</code></li>)}
      </ul>
    </details>
  );
}

// A small chart of a tensor's metric: the runs, the baseline's band, and the steps at which the loss and the tensor depart.
const [WIDTH, HEIGHT, PAD] = [300, 64, 3];
const DASHES = {solid: undefined, dashed: '5 3', dotted: '1.5 2.5'};
const DECADE = 10;

/**
 * @param {string} label a sentence about the chart
 * @param {Array<{part, step: number[], values: Array<?number>}>} lines
 * @param {?{step, low, high}} band
 * @param {Array<{kind, step}>} markers
 * @param {number[]} missing steps at which ranks were missing
 */
export function Spark({label, lines, band, markers, missing}) {
  if (!lines.length) return null;
  const ink = inks(dark.value);
  const {x, y} = scales(lines);
  const path = (step, values) => values.map((value, i) => (y(value) === null ? '' : `${i && y(values[i - 1]) !== null ? 'L' : 'M'}${x(step[i])},${y(value)}`)).join('');
  return (
    <svg class="spark" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={label} preserveAspectRatio="none">
      {band && <polygon points={outline(band, x, y)} fill={COLORS.baseline} opacity="0.16" />}
      {markers.map(({kind, step}) => (
        <line
          key={kind} data-marker={kind} data-step={step} x1={x(step)} x2={x(step)} y1="0" y2={HEIGHT} vector-effect="non-scaling-stroke"
          stroke={kind === 'leaves' ? COLORS.run : ink.text} stroke-width="1.4" stroke-dasharray={kind === 'diverges' ? '4 3' : undefined}
        />
      ))}
      {missing.length > 0 && <path data-marker="missing" d={missing.map((step) => `M${x(step)},${HEIGHT}v-12`).join('')} stroke={ink.text} stroke-width="2" vector-effect="non-scaling-stroke" />}
      {lines.map(({part, step, values}) => (
        <path key={part} d={path(step, values)} fill="none" stroke={COLORS[part]} stroke-width="1.8" stroke-dasharray={DASHES[STROKES[part]]} vector-effect="non-scaling-stroke" />
      ))}
    </svg>
  );
}

/**
 * Return functions that convert steps and values to positions. A value without a position gives null. The scale is
 * logarithmic if the values span a decade.
 */
function scales(lines) {
  const steps = lines.flatMap(({step}) => [step[0], step[step.length - 1]]);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const values = lines.flatMap((line) => line.values.filter(Number.isFinite));
  const [least, most] = [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
  const log = least > 0 && most >= DECADE * least;
  const to = log ? Math.log : (value) => value;
  const [low, high] = [to(least), to(most)];
  const inside = HEIGHT - 2 * PAD;
  const clipped = (value) => Math.max(0, Math.min(HEIGHT, value));
  return {
    x: (step) => Number((((step - first) / Math.max(last - first, 1)) * WIDTH).toFixed(1)),
    y: (value) => (!Number.isFinite(value) || (log && value <= 0) ? null : Number(clipped(PAD + inside * (1 - (to(value) - low) / (high - low || 1))).toFixed(1))),
  };
}

function outline({step, low, high}, x, y) {
  const known = step.flatMap((_, i) => (low[i] === null && high[i] === null ? [] : [i]));
  const above = known.map((i) => `${x(step[i])},${y(high[i]) ?? 0}`);
  const below = known.map((i) => `${x(step[i])},${y(low[i]) ?? HEIGHT}`);
  return [...above, ...below.reverse()].join(' ');
}

const VIEWS = {timeline: 'Timeline', distribution: 'Distribution', what_if: 'What if'};

/**
 * @param {string} layer
 * @param {string} role
 * @param {?number} step step for its links, or null for the selected step
 * @param {boolean} inLine whether the card has the width of the page
 * @param {boolean} inTimeline whether the tensor's charts are below; if so, the card is folded, with no chart and no link to
 *   Timeline
 */
export function Card({layer, role, step, inLine = false, inTimeline = false, id}) {
  const tensor = {layer, role};
  const row = storyOf(tensor);
  const band = useBand(tensor);
  const divergence = useDivergence();
  const ranks = useRanks(tensor);
  const metric = row?.metric ?? band.data?.metric ?? currentMetric();
  const said = <p data-words="band">{band.error ?? whetherInBand(band.data, divergence.data, chosen.value.baseline)}</p>;
  const more = (
    <>
      <Figures tensor={tensor} metric={metric} row={row} band={band.data} divergence={divergence.data} missing={stepsMissing(ranks)} picture={!inTimeline} />
      {!inTimeline && said}
      <p data-words="why">{whyTold(row, isTold())}</p>
      <Links tensor={tensor} step={step ?? row?.since ?? band.data?.since} inTimeline={inTimeline} />
      <Dumps tensor={tensor} />
    </>
  );
  return (
    <section class={inLine ? 'card in-line' : 'card'} id={id} aria-label={`About ${titleOf(tensor)}`} data-card={titleOf(tensor)}>
      <h3><Breakable text={titleOf(tensor)} /></h3>
      <Ranking row={row} />
      <Ranks layer={layer} of={ranks} />
      {inTimeline ? <>{said}<details class="more"><summary>Values, why, links</summary>{more}</details></> : more}
    </section>
  );
}

function Ranking({row}) {
  if (!row) return null;
  return (
    <p class="soft" data-words="ranking">
      {row.blamed && <b class="blamed">Blamed. </b>}Rank {row.harm_rank} by harm{row.error_rank == null ? '' : `, ${row.error_rank} by error`}
    </p>
  );
}

/** The values of baseline → run → reference run, and a chart of them over the steps. */
function Figures({tensor, metric, row, band, divergence, missing, picture}) {
  const parts = ['baseline', 'run', 'reference'].filter((part) => chosen.value[part]);
  const {label, unit} = metricNamed(metric);
  const {data} = useAnswers(parts.map((part) => ['timeline', {run: chosen.value[part], ...tensor, metrics: metric}, versionOf(chosen.value[part])]));
  const lines = parts.map((part, i) => ({part, step: data?.[i]?.step ?? [], values: data?.[i]?.metrics[metric] ?? []})).filter(({step}) => step.length);
  const told = row?.values[metric];
  const values = told ? parts.map((part) => [part, told[part]]) : lines.map((line) => [line.part, at(line)]);
  if (!values.length) return null;
  if (row?.zero_since != null) return <p data-words="values">All its values are zero since step {row.zero_since}: its errors mean nothing.</p>;
  const when = told ? 'medians over the later half' : chosenStep.value === null ? 'at the last sample' : `at step ${chosenStep.value}`;
  return (
    <>
      <p data-words="values">
        {label}: {values.map(([part, value], i) => (
          <span key={part} class="value">{i > 0 && ' → '}<b>{withUnit(value, unit)}</b> <span class={`swatch ${part}`} aria-hidden="true" /> {chosen.value[part]}</span>
        ))} <span class="soft">({when})</span>
      </p>
      {picture && (
        <Spark
          label={`${label} of ${titleOf(tensor)} over the steps in ${lines.map(({part}) => `${chosen.value[part]} (${PARTS[part].label.toLowerCase()})`).join(', ')}`}
          lines={lines} band={band?.metrics[metric]} markers={markersOf({divergence, band, step: null, hasBaseline: Boolean(chosen.value.baseline)})} missing={missing}
        />
      )}
    </>
  );
}

const at = ({step, values}) => values[chosenStep.value === null ? values.length - 1 : placeOf(step, chosenStep.value)];

function Links({tensor, step, inTimeline}) {
  const views = Object.entries(VIEWS).filter(([view]) => !(inTimeline && view === 'timeline'));
  return <p class="links">{views.map(([view, label]) => <Link key={view} to={toTensor(tensor, {view, ...(step == null ? {} : {step})})}>{label}</Link>)}</p>;
}
