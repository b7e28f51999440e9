// From a metric's value to a color and back: ramps, limits that a few odd values do not set, and what they stand for.
import {lerp} from 'zrender/lib/tool/color.js';
import {at, go} from '../address.js';
import {keyOf} from '../map/data.js';
import {chosen} from '../records.js';
import {diverging, SEQUENTIAL} from '../theme.js';
import {factor, number} from '../units.js';

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
  if (metric.scale === 'log') return {of: (run, baseline) => (run === 0 && baseline === 0 ? 0 : Math.log2(run / baseline)), unit: '', show: factor, label: 'ratio'};
  if (metric.scale === 'diverging') return {of: (run, baseline) => Math.abs(run) - Math.abs(baseline), unit: `${metric.unit}, distance from 0`, label: 'difference'};
  return {of: (run, baseline) => run - baseline, unit: metric.unit === '%' ? 'percentage points' : metric.unit, label: 'difference'};
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

// Limits of colors that a few odd values do not set.
/** Multiples of what counts that a ramp reaches at least. */
const AT_LEAST = 16;

const finite = (values) => values.filter(Number.isFinite);

/**
 * [low, high] of a metric over all steps: the 1st and 99th percentile of what runs have, without their warm-up; where these
 * are one, the ends.
 * @param {Array<object>} extents answers of `extent`
 */
export function robustLimits(metric, extents) {
  const there = extents.filter((one) => one.low !== null);
  const [low, high] = [Math.min(...finite(there.map((one) => one.percentiles[0]))), Math.max(...finite(there.map((one) => one.percentiles[2])))];
  const ends = [Math.min(...there.map((one) => one.low)), Math.max(...there.map((one) => one.high))];
  const positive = Math.min(...finite(there.map((one) => one.positive ?? Infinity)));
  return fitted(metric, low < high ? [low, high] : ends, positive);
}

/** [low, high] of the values of one step. */
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

/** [low, high] for multiples of what counts: the largest there is. */
export function limitsOfMultiples(values) {
  let most = AT_LEAST;
  for (const value of values) if (Number.isFinite(value)) most = Math.max(most, Math.abs(value));
  return around(most);
}

// Millions of values as a few thousand: how many there are of each size, to 8 significant bits.
const [DROPPED, ENDLESS] = [16, 0x7f80];

/**
 * @param {Float32Array} numbers [rows, width]
 * @param {number} begin columns before it are left out
 * @returns {{values: Float32Array, counts: number[], most: number}} of finite numbers; `most` is the largest magnitude, exactly
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

// How many times the change that counts a value lies above the baseline's: 1 is the least that `compare` counts.
const rises = new WeakMap();

/** By tensor the changes that count, of an answer of `spread`. */
function placesIn(spread) {
  if (!rises.has(spread)) rises.set(spread, new Map(spread.layer.map((layer, i) => [keyOf(layer, spread.role[i]), i])));
  return rises.get(spread);
}

/**
 * @param {object} spread answer of `spread`
 * @returns {function(string, string): ?function(number, number): number} of a layer and role what makes a multiple of a value and the baseline's; null where nothing is known
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

/** A multiple as people read it. */
export const asMultiple = (value) => (Number.isNaN(value) ? '-' : `${number(value, 2)}x threshold`);

// What colors stand for, and from where to where: as the address has it, or as the values suggest.
/** What colors can stand for. */
export const CHOICES = {
  spread: 'changes against the baseline',
  all: 'values, limits of all steps',
  step: 'values, limits of this step',
};

/** What can be chosen now: without a baseline no change is known. */
export const offered = () => Object.keys(CHOICES).filter((name) => name !== 'spread' || chosen.value.baseline);

export const currentChoice = () => (offered().includes(at('color')) ? at('color') : offered()[0]);

// The limits say what they are of: those of another metric or choice are passed over.
const nameOf = (metric, choice) => `${metric.name} ${choice}`;

/** [low, high] that somebody set; null: none. */
export function limitsSet(metric, choice) {
  const found = /^(\S+ \S+) (\S+) (\S+)$/.exec(at('limits') ?? '');
  const ends = found?.[1] === nameOf(metric, choice) ? [Number(found[2]), Number(found[3])] : [];
  return ends.length && ends.every(Number.isFinite) && ends[0] < ends[1] ? ends : null;
}

const short = (value) => Number(value.toPrecision(4));

/** @param {?Array<number>} ends null: as the values suggest */
export const setLimits = (metric, choice, ends) => go({limits: ends && `${nameOf(metric, choice)} ${ends.map(short).join(' ')}`});
