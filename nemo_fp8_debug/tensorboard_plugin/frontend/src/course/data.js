// The data of Course: a metric of all tensors over all steps, the run's scalars, and the steps at which the run went wrong.
import {useEffect} from 'preact/hooks';
import {at} from '../address.js';
import {againstSpread, robustLimits} from '../color/scales.js';
import {keyOf} from '../map/data.js';
import {chosen, nameOf, suggest, table, versionOf} from '../records.js';
import {calledBy, isBeside, shownRuns} from '../runs/beside.js';
import {useAnswers} from '../server.js';
import {judged} from '../story/judged.js';
import {aboutMetric} from '../timeline/metrics.jsx';
import {axisOf, recorded} from '../timeline/option.js';
import {ROLES, shown, titleOf} from '../units.js';

// Small multiples: one for each role. Their rows are layers in order of execution.
/** Return [{role, label, tensors, names}] of all roles that have tensors. `tensors` are indices of rows in the answer. */
export function multiplesOf({layer, role, kind, depth}) {
  return ROLES.map((one) => {
    const tensors = layer.flatMap((_, i) => (role[i] === one ? [i] : []));
    return {role: one, label: shown(one), tensors, names: tensors.map((i) => (depth[i] === null ? layer[i] : `${depth[i]} ${kind[i]}`))};
  }).filter(({tensors}) => tensors.length > 0);
}

/** Return the tensors at their worst steps, the worst tensor first: {layer, role, value, number, step, since}. */
export function ranked({course, numbers, warmUp}, badness, counts) {
  const width = course.first.length;
  const rows = course.layer.map((layer, i) => {
    const row = {layer, role: course.role[i], value: NaN, number: NaN, step: null, since: null};
    let inRow = 0;
    for (let j = 0; j < width; j += 1) {
      const number = numbers[i * width + j];
      if (Number.isNaN(number) || course.first[j] <= warmUp) continue;
      if (Number.isNaN(row.number) || badness(number) > badness(row.number)) Object.assign(row, {value: course.values[i * width + j], number, step: course.first[j]});
      inRow = badness(number) > counts ? inRow + 1 : 0;
      if (inRow === IN_A_ROW && row.since === null) row.since = course.first[j - IN_A_ROW + 1];
    }
    return row;
  });
  return rows.filter((row) => !Number.isNaN(row.number)).sort((a, b) => badness(b.number) - badness(a.number));
}

const IN_A_ROW = 3;

// The scalars of the runs, shown above the map.
const SCALARS = ['loss', 'lr', 'grad_norm'];

/**
 * Return the recorded scalars of the runs within a span of steps.
 * @param {object} losses answers of `loss`, by key of `shownRuns`
 * @returns {Array<{name, label, unit, log, limits, left, lines: Array<{part, step: number[], values: Array<?number>}>}>}
 */
export function linesOf(losses, span) {
  return SCALARS.map((name) => {
    const lines = Object.entries(losses).map(([part, data]) => ({part, ...within(recorded(data, name), span)})).filter(({values}) => values.some((value) => value !== null));
    const {label, unit} = aboutMetric(name);
    return {name, label, unit, lines, ...axisOf('', true, lines)};
  }).filter(({lines}) => lines.length > 0);
}

function within({step, values}, [from, to]) {
  const kept = step.flatMap((at, i) => (at >= from && at <= to ? [i] : []));
  return {step: kept.map((i) => step[i]), values: kept.map((i) => values[i])};
}

// The steps in the verdict at which the run's loss departs from the baseline's loss, and at which the first tensor leaves
// its band.
/** @returns {Array<{step, label, kind}>} the marks that are known by now */
export function useMarks() {
  const {run, baseline} = chosen.value;
  const comparison = (judged.value.data ?? judged.value.partial)?.comparison;
  const first = comparison?.out_of_band[0];
  useEffect(() => {
    if (first) suggest(run, baseline, first.metric);
  }, [first]);
  if (!comparison) return [];
  const since = comparison.runs.run.above_baseline_since;
  return [
    ...(since == null ? [] : [{step: since, kind: 'loss', label: `loss departs at ${since}`}]),
    ...(first ? [{step: first.onset, kind: 'tensor', label: `${titleOf(first)} at ${first.onset}`}] : []),
  ];
}

/** Number of columns to request: as many as a wide window has pixels for. */
const COLUMNS = 800;

const AGAINST = 'against';

/** Return the choices by key, in words: each run, and some runs against the baseline. */
export function offered() {
  const keys = Object.keys(shownRuns.value).filter((key) => shownRuns.value[key]);
  const held = chosen.value.baseline ? keys.filter((key) => key === 'run' || isBeside(key)) : [];
  const against = held.map((key) => [key === 'run' ? AGAINST : `${AGAINST} ${key}`, `${calledBy(key)} against ${nameOf('baseline')}`]);
  return Object.fromEntries([...against, ...keys.map((key) => [key, calledBy(key)])]);
}

/** Return whether a choice is a comparison with the baseline. */
export const isAgainst = (shown) => shown.startsWith(AGAINST);

/** Return the key of the run in a choice. */
export const keyShown = (shown) => (isAgainst(shown) ? shown.slice(AGAINST.length + 1) || 'run' : shown);

export function currentlyShown() {
  const names = Object.keys(offered());
  return names.includes(at('show')) ? at('show') : names[0];
}

/**
 * @param {[number, number]} span of steps
 * @returns {{data: ?{metric, shown, title, course, warmUp, numbers, baseline, robust}, error, loading}} `numbers`: the
 *   numbers that colors show, [tensors, columns]. `warmUp`: the last step of the run's warm-up, or -1 without a warm-up.
 */
export function useCourse(metric, shown, [from, to]) {
  const against = isAgainst(shown);
  const key = keyShown(shown);
  const of = (route, which, more = {}) => [route, {run: shownRuns.value[which], metric: metric.name, table: table.value, ...more}, versionOf(shownRuns.value[which])];
  const span = {from, to, columns: COLUMNS};
  const {data, error, loading} = useAnswers([of('course', key, span), ...(against ? [of('course', 'baseline', span), of('spread', 'baseline')] : [of('extent', key)])]);
  return {data: data && taken(metric, data, shown), error, loading};
}

const made = new WeakMap();

/**
 * Return the data of some answers, the same object for the same answers. The data names its metric and run, because it stays
 * until the next answers arrive.
 */
function taken(metric, [course, other, spread], shown) {
  const of = {metric, shown, title: offered()[shown], course, warmUp: course.warm_up ?? -1};
  if (made.get(course)?.other !== other) made.set(course, {other, taken: {...of, ...(isAgainst(shown) ? multiples(course, other, spread) : {numbers: course.values, robust: robustLimits(metric, [other])})}});
  return made.get(course).taken;
}

function multiples(course, baseline, spread) {
  const width = course.first.length;
  const numbers = new Float32Array(course.values.length).fill(NaN);
  const of = againstSpread(spread);
  const rowOf = new Map(baseline.layer.map((layer, i) => [keyOf(layer, baseline.role[i]), i]));
  const columnOf = course.first.map((step) => nearest(baseline.first, step));
  for (const [i, layer] of course.layer.entries()) {
    const row = rowOf.get(keyOf(layer, course.role[i]));
    const times = of(layer, course.role[i]);
    if (row === undefined || !times) continue;
    for (let j = 0; j < width; j += 1) numbers[i * width + j] = times(course.values[i * width + j], baseline.values[row * baseline.first.length + columnOf[j]]);
  }
  return {numbers, baseline};
}

/** Return the index of the nearest of ascending steps. */
function nearest(steps, step) {
  let [low, high] = [0, steps.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
}
