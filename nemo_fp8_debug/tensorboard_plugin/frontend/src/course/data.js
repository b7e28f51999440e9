// A metric of all tensors over all steps, of the runs that are needed for what is shown.
import {at} from '../address.js';
import {robustLimits} from '../color/limits.js';
import {againstSpread} from '../color/against.js';
import {keyOf} from '../map/met.js';
import {chosen, nameOf, table, versionOf} from '../records.js';
import {useAnswers} from '../server.js';

/** Columns that are asked for: what a wide window has pixels for. */
const COLUMNS = 800;

/** What can be shown, in words. */
export function offered() {
  const parts = Object.keys(chosen.value).filter((part) => chosen.value[part]);
  const against = parts.includes('baseline') ? {against: `${nameOf('run')} against ${nameOf('baseline')}`} : {};
  return {...against, ...Object.fromEntries(parts.map((part) => [part, nameOf(part)]))};
}

export function currentlyShown() {
  const names = Object.keys(offered());
  return names.includes(at('show')) ? at('show') : names[0];
}

/**
 * @param {[number, number]} span of steps
 * @returns {{data: ?{course, numbers, baseline, robust}, error, loading}} `numbers` what is colored, [tensors, columns]
 */
export function useCourse(metric, shown, [from, to]) {
  const against = shown === 'against';
  const part = against ? 'run' : shown;
  const of = (route, role, more = {}) => [route, {run: chosen.value[role], metric: metric.name, table: table.value, ...more}, versionOf(chosen.value[role])];
  const span = {from, to, columns: COLUMNS};
  const {data, error, loading} = useAnswers([of('course', part, span), ...(against ? [of('course', 'baseline', span), of('spread', 'baseline')] : [of('extent', part)])]);
  return {data: data && taken(metric, data, against), error, loading};
}

const made = new WeakMap();

/** The same object for the same answers. */
function taken(metric, [course, other, spread], against) {
  if (made.get(course)?.other !== other) made.set(course, {other, taken: against ? multiples(course, other, spread) : {course, numbers: course.values, robust: robustLimits(metric, [other]), warmUp: other.warm_up}});
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
  return {course, numbers, baseline, warmUp: course.first[Math.ceil(width / 10) - 1]};
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
