// What the colors of the map show at the selected step.
import {againstSpread, asMultiple, currentChoice, limitsOfMultiples, limitsOfValues, limitsSet, robustLimits, scaleOf, scaleOfMultiples} from '../color/scales.js';
import {chosen, table, versionOf} from '../records.js';
import {useAnswers} from '../server.js';
import {LIMITS} from '../what_if/rows.js';
import {cells} from './data.js';

/**
 * Return what the colors need from all steps. Request it only after the maps are drawn.
 * @returns {{choice: string, spread: ?object, extents: ?Array, waiting: boolean}} `choice`: what the colors can show now
 */
export function useBackground(metric, parts, samples) {
  const wanted = currentChoice();
  const drawn = parts.every((part) => samples[part]);
  const question = (route, part) => [route, {run: chosen.value[part], metric: metric.name, table: table.value}, versionOf(chosen.value[part])];
  const asked = !drawn || wanted === 'step' ? [] : wanted === 'spread' ? [question('spread', 'baseline')] : parts.map((part) => question('extent', part));
  const {data, loading} = useAnswers(asked);
  const there = Boolean(data?.length) && !loading && data.every(Boolean);
  return {
    choice: there ? wanted : 'step',
    spread: there && wanted === 'spread' ? data[0] : null,
    extents: there && wanted === 'all' ? data : null,
    waiting: wanted !== 'step' && !there,
  };
}

/**
 * Return {choice, scale, automatic, distribution, counting, note, set, numberOf, show}. `numberOf` takes a part and returns
 * a function that converts a tensor's value to the number that its color shows.
 */
export function coloringOf(metric, parts, samples, background) {
  const {choice, waiting} = background;
  const numberOf = choice === 'spread' ? multiplesOf(samples, background.spread) : () => (layer, role, value) => value;
  const numbers = parts.flatMap((part) => cells.value.tensors.map(({layer, role}) => numberOf(part)(layer, role, samples[part].of(layer, role))));
  const automatic = {spread: () => limitsOfMultiples(numbers), all: () => robustLimits(metric, background.extents), step: () => limitsOfValues(metric, numbers)}[choice]();
  const set = limitsSet(metric, choice);
  const limits = set ?? automatic;
  return {
    choice, automatic, numberOf, set: Boolean(set),
    scale: choice === 'spread' ? scaleOfMultiples(metric, limits) : scaleOf(metric, limits),
    distribution: choice === 'all' ? together(background.extents) : {values: numbers.filter((value) => !Number.isNaN(value))},
    counting: choice === 'spread' ? [-1, 1] : LIMITS[metric.name] ? [LIMITS[metric.name]] : [],
    note: waiting ? 'Reading the other steps …' : NOTES[choice](background),
    show: choice === 'spread' ? asMultiple : undefined,
  };
}

const NOTES = {
  spread: () => `Multiples of the threshold, which is above the moves of ${chosen.value.baseline} itself.`,
  all: ({extents}) => (extents.some((one) => one.warm_up !== null) ? 'From the 1st to the 99th percentile. The warm-up, the first tenth of the samples, is left out.' : ''),
  step: () => '',
};

function multiplesOf(samples, spread) {
  const of = againstSpread(spread);
  return () => (layer, role, value) => of(layer, role)?.(value, samples.baseline.of(layer, role)) ?? NaN;
}

function together(extents) {
  return {values: extents.flatMap((one) => one.values), counts: extents.flatMap((one) => one.counts)};
}
