// From a metric's value to its place on a scale of colors, and back.
import {diverging, SEQUENTIAL} from '../theme.js';

const LINEAR = {to: (x) => x, from: (x) => x};
// Most percents are small, and one that is not would leave the others one color.
const ROOT = {to: (x) => Math.sign(x) * Math.sqrt(Math.abs(x)), from: (x) => Math.sign(x) * x * x};
const LOG = {to: (x) => (x > 0 ? Math.log10(x) : NaN), from: (x) => 10 ** x};

const wayOf = (metric) => (metric.scale === 'log' ? LOG : metric.unit === '%' ? ROOT : LINEAR);

/**
 * {to, from, low, high, colors} of a metric over what samples hold.
 * @param {Array<{low, high, positive}>} extents
 */
export function scaleOf(metric, extents) {
  const least = Math.min(...extents.map((e) => (metric.scale === 'log' ? e.positive : e.low)));
  const most = Math.max(...extents.map((e) => e.high));
  const way = wayOf(metric);
  if (!Number.isFinite(least) || !Number.isFinite(most)) return {...way, low: 0, high: 1, colors: SEQUENTIAL};
  if (metric.scale === 'diverging') return centered(way, Math.max(Math.abs(least), Math.abs(most)));
  const [low, high] = [way.to(metric.unit === '%' ? Math.min(0, least) : least), way.to(most)];
  const colors = metric.worse < 0 ? [...SEQUENTIAL].reverse() : SEQUENTIAL;
  return {...way, low, high: high > low ? high : low + 1, colors};
}

const centered = (way, most) => ({...way, low: -way.to(most || 1), high: way.to(most || 1), colors: diverging()});

/** How bad a value of a metric is, more for worse; metrics around 0 by their distance from it. */
export const badnessOf = (metric) => (metric.scale === 'diverging' ? Math.abs : (value) => metric.worse * value);

/** What is made of two values: how many times as much for metrics on a log scale, else by how much more; in which unit. */
export function differenceOf(metric) {
  if (metric.scale === 'log') return {of: (run, baseline) => (run === 0 && baseline === 0 ? 0 : Math.log2(run / baseline)), unit: 'log2 of the ratio'};
  if (metric.scale === 'diverging') return {of: (run, baseline) => Math.abs(run) - Math.abs(baseline), unit: `${metric.unit}, distance from 0`};
  return {of: (run, baseline) => run - baseline, unit: metric.unit === '%' ? 'percentage points' : metric.unit};
}

/** How bad a difference is: a distance from 0 that grew is worse. */
export const badnessOfDifference = (metric) => (metric.scale === 'diverging' ? (value) => value : (value) => metric.worse * value);

/** A scale around 0 for differences. */
export function scaleOfDifferences(metric, values) {
  const finite = values.filter(Number.isFinite).map(Math.abs);
  const scale = centered(metric.scale === 'log' ? LINEAR : wayOf(metric), Math.max(0, ...finite));
  return metric.worse < 0 && metric.scale !== 'diverging' ? {...scale, colors: [...diverging()].reverse()} : scale;
}
