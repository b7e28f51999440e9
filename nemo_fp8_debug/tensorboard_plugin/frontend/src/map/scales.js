// From a figure's value to its place on a scale of colours, and back.
import {diverging, SEQUENTIAL} from '../theme.js';

const LINEAR = {to: (x) => x, from: (x) => x};
// Most per cents are small, and one that is not would leave the others one colour.
const ROOT = {to: (x) => Math.sign(x) * Math.sqrt(Math.abs(x)), from: (x) => Math.sign(x) * x * x};
const LOG = {to: (x) => (x > 0 ? Math.log10(x) : NaN), from: (x) => 10 ** x};

const wayOf = (figure) => (figure.scale === 'log' ? LOG : figure.unit === '%' ? ROOT : LINEAR);

/**
 * {to, from, low, high, colours} of a figure over what samples hold.
 * @param {Array<{low, high, positive}>} extents
 */
export function scaleOf(figure, extents) {
  const least = Math.min(...extents.map((e) => (figure.scale === 'log' ? e.positive : e.low)));
  const most = Math.max(...extents.map((e) => e.high));
  const way = wayOf(figure);
  if (!Number.isFinite(least) || !Number.isFinite(most)) return {...way, low: 0, high: 1, colours: SEQUENTIAL};
  if (figure.scale === 'diverging') return centred(way, Math.max(Math.abs(least), Math.abs(most)));
  const [low, high] = [way.to(figure.unit === '%' ? Math.min(0, least) : least), way.to(most)];
  const colours = figure.worse < 0 ? [...SEQUENTIAL].reverse() : SEQUENTIAL;
  return {...way, low, high: high > low ? high : low + 1, colours};
}

const centred = (way, most) => ({...way, low: -way.to(most || 1), high: way.to(most || 1), colours: diverging()});

/** How bad a value of a figure is, more for worse; figures around 0 by their distance from it. */
export const badnessOf = (figure) => (figure.scale === 'diverging' ? Math.abs : (value) => figure.worse * value);

/** What is made of two values: how many times as much for figures on a log scale, else by how much more; in which unit. */
export function differenceOf(figure) {
  if (figure.scale === 'log') return {of: (run, good) => (run === 0 && good === 0 ? 0 : Math.log2(run / good)), unit: 'log2 of the ratio'};
  if (figure.scale === 'diverging') return {of: (run, good) => Math.abs(run) - Math.abs(good), unit: `${figure.unit}, distance from 0`};
  return {of: (run, good) => run - good, unit: figure.unit === '%' ? 'percentage points' : figure.unit};
}

/** How bad a difference is: a distance from 0 that grew is worse. */
export const badnessOfDifference = (figure) => (figure.scale === 'diverging' ? (value) => value : (value) => figure.worse * value);

/** A scale around 0 for differences. */
export function scaleOfDifferences(figure, values) {
  const finite = values.filter(Number.isFinite).map(Math.abs);
  const scale = centred(figure.scale === 'log' ? LINEAR : wayOf(figure), Math.max(0, ...finite));
  return figure.worse < 0 && figure.scale !== 'diverging' ? {...scale, colours: [...diverging()].reverse()} : scale;
}
