// Color scales: they convert a metric's values to colors and back. Also their limits, which ignore a few outliers, and the
// choice of what colors show.
import {lerp} from 'zrender/lib/tool/color.js';
import {at, go} from '../address.js';
import {keyOf} from '../map/data.js';
import {chosen} from '../records.js';
import {diverging, SEQUENTIAL} from '../theme.js';
import {factor, number} from '../units.js';

const LINEAR = {to: (x) => x, from: (x) => x};
// Most percentages are small. On a linear scale, one large percentage would give all others the same color.
const ROOT = {to: (x) => Math.sign(x) * Math.sqrt(Math.abs(x)), from: (x) => Math.sign(x) * x * x};
const LOG = {to: (x) => (x > 0 ? Math.log10(x) : NaN), from: (x) => 10 ** x};
// A scale for multiples of the threshold: almost no color below 1, and one more step for each doubling.
const FAINT = 0.25;
const MULTIPLES = {
  to: (x) => Math.sign(x) * (Math.abs(x) <= 1 ? FAINT * Math.abs(x) : FAINT + Math.log2(Math.abs(x))),
  from: (x) => Math.sign(x) * (Math.abs(x) <= FAINT ? Math.abs(x) / FAINT : 2 ** (Math.abs(x) - FAINT)),
};

export const wayOf = (metric) => (metric.scale === 'log' ? LOG : metric.unit === '%' ? ROOT : LINEAR);

/**
 * Return a scale {to, from, low, high, center, colors, share}. `low` and `high` are limits after conversion by `to`. `share`
 * converts a value to its place on the ramp, from 0 to 1, or NaN for NaN.
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

/** Return the scale of a metric between two values. */
export function scaleOf(metric, [low, high]) {
  const way = wayOf(metric);
  if (metric.scale === 'diverging') return scaled(way, Math.min(way.to(low), 0), Math.max(way.to(high), 0), diverging(), 0);
  return scaled(way, way.to(low), way.to(high), oriented(metric, SEQUENTIAL));
}

/** Return a scale around 0 for multiples of the threshold. */
export const scaleOfMultiples = (metric, [low, high]) => scaled(MULTIPLES, MULTIPLES.to(low), MULTIPLES.to(high), metric.scale === 'diverging' ? diverging() : oriented(metric, diverging()), 0);

/**
 * Return a function that rates a value of a metric: a worse value gets a larger number. On diverging scales, the number is
 * the distance from 0.
 */
export const badnessOf = (metric) => (metric.scale === 'diverging' ? Math.abs : (value) => metric.worse * value);

/** Return how to compare two values of a metric: by their ratio on a log scale, otherwise by their difference. */
export function differenceOf(metric) {
  if (metric.scale === 'log') return {of: (run, baseline) => (run === 0 && baseline === 0 ? 0 : Math.log2(run / baseline)), unit: '', show: factor, label: 'ratio'};
  if (metric.scale === 'diverging') return {of: (run, baseline) => Math.abs(run) - Math.abs(baseline), unit: `${metric.unit}, distance from 0`, label: 'difference'};
  return {of: (run, baseline) => run - baseline, unit: metric.unit === '%' ? 'percentage points' : metric.unit, label: 'difference'};
}

/**
 * Return a function that rates a difference: a worse difference gets a larger number. On diverging scales, a larger distance
 * from 0 is worse.
 */
export const badnessOfDifference = (metric) => (metric.scale === 'diverging' ? (value) => value : (value) => metric.worse * value);

/** Return a scale around 0 for differences. */
export function scaleOfDifferences(metric, values) {
  const finite = values.filter(Number.isFinite).map(Math.abs);
  const way = metric.scale === 'log' ? LINEAR : wayOf(metric);
  const most = way.to(Math.max(0, ...finite) || 1);
  return scaled(way, -most, most, metric.worse < 0 && metric.scale !== 'diverging' ? [...diverging()].reverse() : diverging(), 0);
}

const SHADES = 256;
const shades = new Map();

/** Return the color at a place of a ramp, from 0 to 1. */
export function colorOf({colors}, share) {
  const key = colors.join();
  if (!shades.has(key)) shades.set(key, Array.from({length: SHADES}, (_, i) => lerp(i / (SHADES - 1), colors)));
  return shades.get(key)[Math.round(share * (SHADES - 1))];
}

// Limits of colors that ignore a few outliers.
/** A ramp ends at this multiple of the threshold or above. */
const AT_LEAST = 16;

const finite = (values) => values.filter(Number.isFinite);

/**
 * Return the limits [low, high] of a metric over all steps: the 1st and 99th percentile of the runs' values, without the
 * warm-up. If these are equal, return the smallest and the largest value.
 * @param {Array<object>} extents answers of `extent`
 */
export function robustLimits(metric, extents) {
  const there = extents.filter((one) => one.low !== null);
  const [low, high] = [Math.min(...finite(there.map((one) => one.percentiles[0]))), Math.max(...finite(there.map((one) => one.percentiles[2])))];
  const ends = [Math.min(...there.map((one) => one.low)), Math.max(...there.map((one) => one.high))];
  const positive = Math.min(...finite(there.map((one) => one.positive ?? Infinity)));
  return fitted(metric, low < high ? [low, high] : ends, positive);
}

/** Return the limits [low, high] of the values of one step. */
export function limitsOfValues(metric, values) {
  const found = finite(values);
  const least = found.reduce((a, b) => Math.min(a, b), Infinity);
  const most = found.reduce((a, b) => Math.max(a, b), -Infinity);
  const positive = found.reduce((a, b) => (b > 0 ? Math.min(a, b) : a), Infinity);
  return fitted(metric, [least, most], positive);
}

function fitted(metric, [low, high], positive) {
  if (!Number.isFinite(low) || !Number.isFinite(high)) return metric.scale === 'log' ? [1, 10] : [0, 1];
  if (metric.scale === 'diverging') return around(Math.max(Math.abs(low), Math.abs(high)) || 1);
  if (metric.scale === 'log') return Number.isFinite(positive) ? [Math.max(low, positive), Math.max(high, positive)] : [1, 10];
  return [metric.unit === '%' ? Math.min(0, low) : low, high];
}

const around = (most) => [-most, most];

/** Return the limits [low, high] for multiples of the threshold, from the largest multiple. */
export function limitsOfMultiples(values) {
  let most = AT_LEAST;
  for (const value of values) if (Number.isFinite(value)) most = Math.max(most, Math.abs(value));
  return around(most);
}

// Reduces millions of values to a few thousand: counts of values rounded to 8 significant bits.
const [DROPPED, ENDLESS] = [16, 0x7f80];

/**
 * @param {Float32Array} numbers [rows, width]
 * @param {number} begin first column to count
 * @returns {{values: Float32Array, counts: number[], most: number}} the finite numbers, rounded, and their counts; `most` is
 *   the largest magnitude without rounding
 */
export function tallyOf(numbers, width, begin = 0) {
  const bits = new Uint32Array(numbers.buffer, numbers.byteOffset, numbers.length);
  const counts = new Uint32Array(1 << DROPPED);
  let most = 0;
  for (let row = 0; row < bits.length; row += width) {
    for (let i = row + begin; i < row + width; i += 1) {
      const magnitude = bits[i] & 0x7fffffff;
      if (magnitude >>> DROPPED >= ENDLESS) continue;
      counts[(bits[i] >>> DROPPED) + ((bits[i] >>> (DROPPED - 1)) & 1)] += 1; // rounded
      if (magnitude > most) most = magnitude;
    }
  }
  const codes = [...counts.keys()].filter((code) => counts[code] > 0);
  return {values: floats(codes.map((code) => code << DROPPED)), counts: codes.map((code) => counts[code]), most: floats([most])[0]};
}

const floats = (bits) => new Float32Array(Uint32Array.from(bits).buffer);

// Changes against the baseline as multiples of the threshold. 1 is the least change that `compare` counts.
const rises = new WeakMap();

/** Return the index of each tensor in an answer of `spread`. */
function placesIn(spread) {
  if (!rises.has(spread)) rises.set(spread, new Map(spread.layer.map((layer, i) => [keyOf(layer, spread.role[i]), i])));
  return rises.get(spread);
}

/**
 * @param {object} spread answer of `spread`
 * @returns {function(string, string): ?function(number, number): number} function of a layer and a role. It returns null for
 *   an unknown tensor, otherwise a function that converts a value and the baseline's value to a multiple of the threshold.
 */
export function againstSpread(spread) {
  const places = placesIn(spread);
  const count = spread.layer.length;
  const {log2, floor} = spread;
  const scaled = log2 ? (x) => Math.log2(Math.max(x, floor)) : (x) => x;
  return (layer, role) => {
    const i = places.get(keyOf(layer, role));
    if (i === undefined) return null;
    const [rise, fall] = [spread.values[i], spread.values[count + i]];
    return (value, baseline) => {
      if (Number.isNaN(value) || Number.isNaN(baseline)) return NaN;
      if (value === baseline) return 0;
      const change = scaled(value) - scaled(baseline);
      return change / (change > 0 ? rise : fall);
    };
  };
}

/** Return a multiple in words. */
export const asMultiple = (value) => (Number.isNaN(value) ? '-' : `${number(value, 2)}x threshold`);

// What colors show, and their limits: from the address, or else from the values.
/** What colors can show. */
export const CHOICES = {
  spread: 'changes against the baseline',
  all: 'values, limits of all steps',
  step: 'values, limits of this step',
};

/** Return the choices that are possible now. Changes need a baseline. */
export const offered = () => Object.keys(CHOICES).filter((name) => name !== 'spread' || chosen.value.baseline);

export const currentChoice = () => (offered().includes(at('color')) ? at('color') : offered()[0]);

// Limits in the address contain the metric and the choice that they belong to. We ignore limits of others.
const nameOf = (metric, choice) => `${metric.name} ${choice}`;

/** Return the limits [low, high] that the user has set, or null. */
export function limitsSet(metric, choice) {
  const found = /^(\S+ \S+) (\S+) (\S+)$/.exec(at('limits') ?? '');
  const ends = found?.[1] === nameOf(metric, choice) ? [Number(found[2]), Number(found[3])] : [];
  return ends.length && ends.every(Number.isFinite) && ends[0] < ends[1] ? ends : null;
}

const short = (value) => Number(value.toPrecision(4));

/** @param {?Array<number>} ends limits to set, or null for those that the values suggest */
export const setLimits = (metric, choice, ends) => go({limits: ends && `${nameOf(metric, choice)} ${ends.map(short).join(' ')}`});
