// How many times the change that counts a value lies above the baseline's: 1 is the least that `compare` counts.
import {keyOf} from '../map/met.js';

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
export const asMultiple = (value) => (Number.isNaN(value) ? '-' : `${Number(value.toPrecision(2))} times what counts`);
