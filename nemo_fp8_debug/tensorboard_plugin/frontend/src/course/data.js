// A metric of all tensors over all steps, of the runs that are needed for what is shown.
import {at} from '../address.js';
import {robustLimits} from '../color/limits.js';
import {againstSpread} from '../color/against.js';
import {keyOf} from '../map/met.js';
import {chosen, nameOf, table, versionOf} from '../records.js';
import {calledBy, isBeside, shownRuns} from '../runs/beside.js';
import {useAnswers} from '../server.js';

/** Columns that are asked for: what a wide window has pixels for. */
const COLUMNS = 800;

const AGAINST = 'against';

/** What can be shown, in words: a run by its key, or it against the baseline. */
export function offered() {
  const keys = Object.keys(shownRuns.value).filter((key) => shownRuns.value[key]);
  const held = chosen.value.baseline ? keys.filter((key) => key === 'run' || isBeside(key)) : [];
  const against = held.map((key) => [key === 'run' ? AGAINST : `${AGAINST} ${key}`, `${calledBy(key)} against ${nameOf('baseline')}`]);
  return Object.fromEntries([...against, ...keys.map((key) => [key, calledBy(key)])]);
}

/** Whether what is shown is held against the baseline. */
export const isAgainst = (shown) => shown.startsWith(AGAINST);

/** The key of the run that is shown. */
export const keyShown = (shown) => (isAgainst(shown) ? shown.slice(AGAINST.length + 1) || 'run' : shown);

export function currentlyShown() {
  const names = Object.keys(offered());
  return names.includes(at('show')) ? at('show') : names[0];
}

/**
 * @param {[number, number]} span of steps
 * @returns {{data: ?{metric, shown, title, course, warmUp, numbers, baseline, robust}, error, loading}} `numbers` what is colored,
 *   [tensors, columns]; `warmUp` the last step of the run's warm-up, -1 where there is none
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

/** The same object for the same answers; it says what they are of, since they stay until those to the next question are there. */
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

/** The place of the nearest of ascending steps. */
function nearest(steps, step) {
  let [low, high] = [0, steps.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
}
