// Two ways to cast a tensor: as it was, and as it is tried.
import {at} from '../address.js';
import {amaxOf, asScale, currentScale, metricsOf} from '../cast.js';
import {known} from '../records.js';

/** Formats that are tried; those of 16 bits need no scale. */
export const formatsToTry = () => Object.entries(known.value.formats).filter(([, format]) => format.bits <= 8);

export const MOST_MARGIN = 32;

/** Scales are divided by 2 to the power of it. */
export function margin() {
  const value = Number(at('margin') ?? 0);
  return Number.isInteger(value) && Math.abs(value) <= MOST_MARGIN ? value : 0;
}

const cut = (parts, scales, name) => {
  const format = known.value.formats[name];
  const castable = format && scales.every((scale) => scale !== null);
  return {name, format, scale: castable ? Math.min(...scales) : null, scales, metrics: castable ? metricsOf(parts, scales, format) : null};
};

/**
 * How parts of a tensor are cast: in use, and tried (as the address says, else as in use).
 * @returns {{inUse, tried, base: number}} each cut {name, format, scale, scales, metrics}, scale the smallest of them and null
 *   where none is known; base: the scale that others are counted from
 */
export function cuts(rows, parts) {
  const inUse = cut(parts, rows.map(({scale}) => asScale(scale)), rows[0].format);
  const names = formatsToTry().map(([name]) => name);
  const name = [at('format'), inUse.name].find((one) => names.includes(one)) ?? names[0];
  const base = inUse.scale ?? currentScale(amaxOf(parts), known.value.formats[name]);
  const chosen = asScale(Number(at('scale')));
  const scales = parts.map((_, i) => asScale((chosen ?? inUse.scales[i] ?? base) / 2 ** margin()) ?? base);
  const same = inUse.metrics && name === inUse.name && scales.every((scale, i) => scale === inUse.scales[i]);
  return {inUse, tried: same ? inUse : cut(parts, scales, name), base};
}
