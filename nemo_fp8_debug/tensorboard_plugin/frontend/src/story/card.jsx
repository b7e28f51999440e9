// One card for a tensor, wherever one is named: what it does in each run, since when it is out, and whether it is to blame.
import '@preact/signals';
import {step as chosenStep, toTensor} from '../address.js';
import {Breakable} from '../components/breakable.jsx';
import {Link} from '../components/link.jsx';
import {currentMetric} from '../components/pickers.jsx';
import {chosen, metricNamed, PARTS, versionOf} from '../records.js';
import {useAnswer, useAnswers} from '../server.js';
import {markersOf} from '../timeline/happened.js';
import {placeOf, titleOf, withUnit} from '../units.js';
import {useBand, useDivergence} from './band.js';
import {Dumps} from './dumps.jsx';
import {Ranks, stepsMissing, useRanks} from './ranks.jsx';
import {Spark} from './spark.jsx';
import {isTold, storyOf} from './told.js';
import {whetherInBand, whyTold} from './words.js';

const VIEWS = {timeline: 'Timeline', distribution: 'Distribution', what_if: 'What if'};

/**
 * @param {string} layer
 * @param {string} role
 * @param {?number} step that its links go to; null: the one that is looked at
 * @param {boolean} inLine whether it lies across the page
 * @param {boolean} inTimeline whether its charts are below, which it leaves room: no picture, no link to them, and folded
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

/** Baseline → run → reference run, and the same over the steps. */
function Figures({tensor, metric, row, band, divergence, missing, picture}) {
  const parts = ['baseline', 'run', 'reference'].filter((part) => chosen.value[part]);
  const {label, unit} = metricNamed(metric);
  const {data} = useAnswers(parts.map((part) => ['timeline', {run: chosen.value[part], ...tensor, metrics: metric}, versionOf(chosen.value[part])]));
  const lines = parts.map((part, i) => ({part, step: data?.[i]?.step ?? [], values: data?.[i]?.metrics[metric] ?? []})).filter(({step}) => step.length);
  const told = row?.values[metric];
  const values = told ? parts.map((part) => [part, told[part]]) : lines.map((line) => [line.part, at(line)]);
  if (!values.length) return null;
  if (row?.zero_since != null) return <p data-words="values">All its values are zero since step {row.zero_since}: what the format loses of them tells nothing.</p>;
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
          lines={lines} band={band?.metrics[metric]} markers={markersOf({divergence, band, step: null})} missing={missing}
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
