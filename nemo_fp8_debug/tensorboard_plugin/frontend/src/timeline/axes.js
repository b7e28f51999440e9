// Axes of values: linear, logarithmic, or without the values that would squash all others.
import {at} from '../address.js';

/** Choices of axes, as the address has them; automatic where it has none. */
export const AXES = {
  '': {label: 'automatic', told: 'logarithmic where values span a decade'},
  linear: {label: 'linear', told: 'from the least to the largest value'},
  log: {label: 'logarithmic', told: 'values of 0 and below are left out'},
  robust: {label: 'robust', told: '1st to 99th percentile of the values, without the first tenth of the steps (warm-up)'},
};

export const currentAxes = () => (at('axes') in AXES ? at('axes') : '');

const [LOWEST, HIGHEST] = [0.01, 0.99];
/** Part of the steps, from the first on, that is taken for the warm-up. */
const WARM_UP = 0.1;
/** How far an axis goes beyond what it must show, as a part of that. */
const ROOM = 0.05;
const DECADE = 10;

const isNumber = (value) => value !== null && Number.isFinite(value);

/**
 * How the values of lines are drawn.
 * @param {string} kind key of AXES
 * @param {boolean} mayBeLog whether equal ratios mean the same
 * @param {Array<{step: number[], values: Array<?number>}>} lines
 * @returns {{log: boolean, limits: ?[number, number], left: number}} limits: null for those of the values; left: values that
 *   lie outside of the limits or that a logarithm does not have
 */
export function axisOf(kind, mayBeLog, lines) {
  const values = lines.flatMap((line) => line.values.filter(isNumber));
  const log = kind === 'log' ? values.some((value) => value > 0) : kind !== 'linear' && mayBeLog && spansDecade(values);
  const limits = kind === 'robust' ? robust(lines, log) : null;
  const left = values.filter((value) => (log && value <= 0) || (limits && (value < limits[0] || value > limits[1]))).length;
  return {log, limits, left};
}

/** A metric and how its axis is drawn, in words. */
export const axisTold = ({label, unit, log, limits, left}) =>
  [`${label}${unit && unit !== 'log2' ? ` (${unit})` : ''}`, log && 'logarithmic', limits && 'robust', left > 0 && `${left.toLocaleString('en')} value${left === 1 ? '' : 's'} beyond the axis`].filter(Boolean).join(', ');

function spansDecade(values) {
  const positive = values.filter((value) => value > 0);
  const low = positive.reduce((least, value) => Math.min(least, value), Infinity);
  return positive.length > 0 && values.every((value) => value >= 0) && positive.some((value) => value >= DECADE * low);
}

function robust(lines, log) {
  const settled = lines.flatMap(({step, values}) => {
    const from = step[0] + WARM_UP * (step[step.length - 1] - step[0]);
    return values.filter((value, i) => isNumber(value) && step[i] >= from && (!log || value > 0));
  });
  if (!settled.length) return null;
  settled.sort((a, b) => a - b);
  const of = (share) => settled[Math.round(share * (settled.length - 1))];
  const [low, high] = [of(LOWEST), of(HIGHEST)];
  if (log) return low < high ? [low / (high / low) ** ROOM, high * (high / low) ** ROOM] : [low / 2, high * 2];
  const room = (high - low || Math.abs(high) || 1) * ROOM;
  return [low - room, high + room];
}
