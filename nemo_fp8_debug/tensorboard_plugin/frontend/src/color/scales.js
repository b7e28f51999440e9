// From a metric's value to its place on a ramp of colors, and back.
import {lerp} from 'zrender/lib/tool/color.js';
import {diverging, SEQUENTIAL} from '../theme.js';

const LINEAR = {to: (x) => x, from: (x) => x};
// Most percents are small, and one that is not would leave the others one color.
const ROOT = {to: (x) => Math.sign(x) * Math.sqrt(Math.abs(x)), from: (x) => Math.sign(x) * x * x};
const LOG = {to: (x) => (x > 0 ? Math.log10(x) : NaN), from: (x) => 10 ** x};
// Multiples of what counts: below 1 almost no color, and from there a step for each doubling.
const FAINT = 0.25;
const MULTIPLES = {
  to: (x) => Math.sign(x) * (Math.abs(x) <= 1 ? FAINT * Math.abs(x) : FAINT + Math.log2(Math.abs(x))),
  from: (x) => Math.sign(x) * (Math.abs(x) <= FAINT ? Math.abs(x) / FAINT : 2 ** (Math.abs(x) - FAINT)),
};

export const wayOf = (metric) => (metric.scale === 'log' ? LOG : metric.unit === '%' ? ROOT : LINEAR);

/**
 * {to, from, low, high, center, colors, share}: `low` and `high` are places, as of `to`; `share` of a value is its place on
 * the ramp, from 0 to 1, NaN where it has none.
 */
function scaled(way, low, high, colors, center = null) {
  const [least, most] = [low, high > low ? high : low + 1];
  const place = (at) => (center === null ? (at - least) / (most - least) : at < center ? 0.5 - (0.5 * (center - at)) / (center - least || 1) : 0.5 + (0.5 * (at - center)) / (most - center || 1));
  const share = (value) => {
    if (Number.isNaN(value)) return NaN;
    const at = way.to(value);
    return Math.min(1, Math.max(0, Number.isNaN(at) ? 0 : place(at))); // 0 on a logarithmic scale: its least
  };
  return {...way, low: least, high: most, center, colors, share};
}

const oriented = (metric, colors) => (metric.worse < 0 ? [...colors].reverse() : colors);

/** A scale of a metric from a value to another. */
export function scaleOf(metric, [low, high]) {
  const way = wayOf(metric);
  if (metric.scale === 'diverging') return scaled(way, Math.min(way.to(low), 0), Math.max(way.to(high), 0), diverging(), 0);
  return scaled(way, way.to(low), way.to(high), oriented(metric, SEQUENTIAL));
}

/** Around 0, for multiples of what counts. */
export const scaleOfMultiples = (metric, [low, high]) => scaled(MULTIPLES, MULTIPLES.to(low), MULTIPLES.to(high), metric.scale === 'diverging' ? diverging() : oriented(metric, diverging()), 0);

/** How bad a value of a metric is, more for worse; metrics around 0 by their distance from it. */
export const badnessOf = (metric) => (metric.scale === 'diverging' ? Math.abs : (value) => metric.worse * value);

/** What is made of two values: how many times as much for metrics on a log scale, else by how much more. */
export function differenceOf(metric) {
  if (metric.scale === 'log') return {of: (run, baseline) => (run === 0 && baseline === 0 ? 0 : Math.log2(run / baseline)), unit: '', show: asRatio, label: 'ratio'};
  if (metric.scale === 'diverging') return {of: (run, baseline) => Math.abs(run) - Math.abs(baseline), unit: `${metric.unit}, distance from 0`, label: 'difference'};
  return {of: (run, baseline) => run - baseline, unit: metric.unit === '%' ? 'percentage points' : metric.unit, label: 'difference'};
}

/** A ratio by its log2: 0.748 is x1.68. */
export function asRatio(exponent) {
  if (Number.isNaN(exponent)) return '-';
  const ratio = 2 ** exponent;
  if (ratio === 0 || !Number.isFinite(ratio)) return ratio ? 'x∞' : 'x0';
  return `x${ratio >= 1e4 || ratio < 1e-3 ? ratio.toExponential(1) : Number(ratio.toPrecision(ratio < 10 ? 2 : 3))}`;
}

/** How bad a difference is: a distance from 0 that grew is worse. */
export const badnessOfDifference = (metric) => (metric.scale === 'diverging' ? (value) => value : (value) => metric.worse * value);

/** A scale around 0 for differences. */
export function scaleOfDifferences(metric, values) {
  const finite = values.filter(Number.isFinite).map(Math.abs);
  const way = metric.scale === 'log' ? LINEAR : wayOf(metric);
  const most = way.to(Math.max(0, ...finite) || 1);
  return scaled(way, -most, most, metric.worse < 0 && metric.scale !== 'diverging' ? [...diverging()].reverse() : diverging(), 0);
}

const SHADES = 256;
const shades = new Map();

/** The color at a share of a ramp. */
export function colorOf({colors}, share) {
  const key = colors.join();
  if (!shades.has(key)) shades.set(key, Array.from({length: SHADES}, (_, i) => lerp(i / (SHADES - 1), colors)));
  return shades.get(key)[Math.round(share * (SHADES - 1))];
}
