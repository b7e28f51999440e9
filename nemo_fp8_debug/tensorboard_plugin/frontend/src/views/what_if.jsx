// A table of tensors and recipes at a step, with the errors under recipes that were not in use.
import {at, go} from '../address.js';
import {limitsOfValues, limitsSet, scaleOf} from '../color/scales.js';
import {Legend} from '../color/legend.jsx';
import {Answered, Link, Notice} from '../components/basics.jsx';
import {currentStep, Steps} from '../components/steps.jsx';
import {Table} from '../components/table.jsx';
import {details} from '../details.js';
import {chosen, metricNamed, versionOf} from '../records.js';
import {useAnswer} from '../server.js';
import {story} from '../story/judged.js';
import {TensorLink} from '../story/link.jsx';
import {source} from '../source.js';
import {number, placeOf, shown, titleOf} from '../units.js';
import {byTensor, exceeds, IN_USE, isAbout, keeps, leastOf, LIMITS, METRICS, styleOf, valueOf, worstFirst} from '../what_if/rows.js';
import {asked, Picker, rowsOf, Trying} from '../what_if/try.jsx';

const PAGE = 30;
/** The name of this view's color limits in the address. */
const CHOICE = 'what_if';
const metricOf = () => (METRICS.includes(at('metric')) ? at('metric') : METRICS[0]);

/** Return the run's sampled step that is nearest to the selected step. */
function stepOf() {
  const sampled = details.value.run?.data?.steps ?? [];
  return sampled.length ? sampled[placeOf(sampled, currentStep())] : null;
}

export function WhatIf() {
  const {run} = chosen.value;
  const step = stepOf();
  const answer = useAnswer(step === null ? null : 'others', {run, step}, versionOf(run));
  return (
    <>
      <div class="controls">
        <Metric />
        <Role />
        <label>
          Search
          <input type="search" value={at('find') ?? ''} onInput={(event) => go({find: event.target.value || null})} placeholder="part of a layer's name" data-picker="find" />
        </label>
        <Steps />
      </div>
      <NotByFp8 />
      <Answered answer={answer}>{(data) => <Tried run={run} step={data.step} rows={data.rows} />}</Answered>
    </>
  );
}

/** A note that another recipe would not help, if FP8 is not the cause. */
function NotByFp8() {
  const told = story.value?.headline;
  if (told?.cause === undefined || told.cause === 'unknown' || (told.about_fp8 !== false && told.cause !== 'none')) return null;
  const found = told.cause === 'none' ? 'The verdict names no cause, so no recipe needs to change.' : `FP8 is not to blame (${told.confidence} confidence), so another recipe would not have helped.`;
  return <p class="told" data-words="not by FP8"><b>{found}</b> The table shows the errors of each tensor under other recipes. <Link to={{view: 'verdict'}}>All the evidence</Link></p>;
}

function labelOf(metric) {
  const {label, unit} = metricNamed(metric);
  return unit ? `${label} (${unit})` : label;
}

const Metric = () => (
  <label>
    Metric
    <select value={metricOf()} onChange={(event) => go({metric: event.target.value})} data-picker="metric">
      {METRICS.map((metric) => <option key={metric} value={metric}>{labelOf(metric)}</option>)}
    </select>
  </label>
);

const Role = () => (
  <label>
    Operand
    <select value={at('only') ?? ''} onChange={(event) => go({only: event.target.value || null})} data-picker="only">
      <option value="">all</option>
      {['input', 'weight', 'grad_output'].map((role) => <option key={role} value={role}>{shown(role)}</option>)}
    </select>
  </label>
);

function Tried({run, step, rows}) {
  const recorded = byTensor([rows]);
  const questions = asked().filter((recipe) => !recorded.recipes.includes(recipe)).map((recipe) => ({run, step, recipe}));
  const all = byTensor([rows, ...questions.map(rowsOf).filter(Boolean)]);
  return (
    <>
      {source.live ? <Picker inUse={recorded.inUse} /> : <NeedsServer run={run} />}
      <Trying questions={questions} version={versionOf(run)} />
      <Recipes run={run} step={step} {...all} />
      {source.live && !all.recipes.length && <NoOther run={run} />}
    </>
  );
}

const NeedsServer = ({run}) => (
  <p class="soft">
    This page has no server to try recipes that were not recorded. Run <code>nemo-fp8-debug view</code>, or add a recipe to the
    record before you write the page: <code>nemo-fp8-debug replay {run} --recipe current</code>.
  </p>
);

const NoOther = ({run}) => (
  <Notice title="No other recipe was tried at this step">
    <p>
      Try one above: we replay it from the record's histograms. Results of float32 tensors are approximate and marked “about”, all
      others are exact. To try recipes during a run, also block recipes, which histograms cannot replay, use{' '}
      <code>{'FP8DebugCallback(what_if=["current", "blockwise", "mxfp8"])'}</code>. To add a recipe to the record at every step, run{' '}
      <code>nemo-fp8-debug replay {run} --recipe current</code>.
    </p>
  </Notice>
);

function Recipes({run, step, tensors, recipes, inUse}) {
  const metric = metricOf();
  const find = (at('find') ?? '').toLowerCase();
  const wanted = (tensor) => (!at('only') || tensor.role === at('only')) && titleOf(tensor).toLowerCase().includes(find);
  const listed = worstFirst(tensors.filter(wanted), metric);
  const names = [IN_USE, ...recipes];
  const values = tensors.flatMap((tensor) => names.map((name) => valueOf(tensor, name, metric))).filter((value) => value !== null);
  const about = metricNamed(metric);
  const automatic = limitsOfValues(about, values);
  const set = limitsSet(about, CHOICE);
  const scale = scaleOf(about, set ?? automatic);
  if (!listed.length) return <Notice><p>No tensor matches; clear the search or the operand.</p></Notice>;
  const columns = [
    {label: 'tensor', of: titleOf, text: true, show: (row) => <TensorLink {...row} step={step} view="distribution" />},
    ...names.map((name) => columnOf(name, inUse, metric, scale)),
  ];
  const summary = ['within the limits', ...names.map((name) => share(listed, name))];
  const caption = `${labelOf(metric)} of ${listed.length} tensors of ${run} at step ${step}, largest value in use first`;
  return (
    <>
      <Legend
        metric={about} choice={CHOICE} scale={scale} label={labelOf(metric)} automatic={automatic} set={Boolean(set)}
        distribution={{values}} counting={LIMITS[metric] === undefined ? [] : [LIMITS[metric]]}
      />
      <Key metric={metric} />
      <Table key={`${metric} ${find} ${at('only')}`} name={`recipes of ${run} at step ${step}`} caption={caption} columns={columns} rows={listed} summary={summary} first={PAGE} />
    </>
  );
}

function columnOf(name, inUse, metric, scale) {
  const used = inUse.length === 1 ? inUse[0] : `${inUse.length} recipes`;
  return {
    label: name,
    under: name === IN_USE ? used : undefined,
    of: (row) => valueOf(row, name, metric),
    cell: (row) => ({style: styleOf(scale, valueOf(row, name, metric)), 'data-recipe': name}),
    show: (row) => <Cell value={valueOf(row, name, metric)} metric={metric} least={leastOf(row, metric)} about={isAbout(row, name)} />,
  };
}

function Cell({value, metric, least, about}) {
  const told = about && value !== null ? `about ${number(value)}` : number(value);
  if (value !== null && value === least) return <><Mark exceeded={exceeds(metric, value)} /><strong>{told}</strong><span role="img" aria-label="lowest of the row"> ★</span></>;
  return <><Mark exceeded={exceeds(metric, value)} />{told}</>;
}

const Mark = ({exceeded}) => exceeded && <span role="img" aria-label="above the limit">▲ </span>;

/** Return the share of tensors that keep all limits under a recipe, among tensors with known errors. */
function share(tensors, name) {
  const known = tensors.map((tensor) => keeps(tensor.by.get(name))).filter((kept) => kept !== null);
  const kept = known.filter(Boolean).length;
  return known.length ? `${Math.round((100 * kept) / known.length)}% (${kept} of ${known.length})` : '-';
}

const Key = ({metric}) => (
  <p class="soft">
    {LIMITS[metric] !== undefined && `▲ above the limit of ${LIMITS[metric]}; `}★ lowest of the row. Limits: relative error{' '}
    {LIMITS.relative_error}, underflow {LIMITS.underflow_pct}%, overflow {LIMITS.overflow_pct}%.
  </p>
);
