// What an operand may lose: analysis/options.Budget of the Python side, at its defaults.

export const LIMITS = {relative_error: 0.06, underflow_pct: 1, overflow_pct: 0.01};

/** Whether a figure is above its limit; of those that have one. */
export const exceeds = (figure, value) => value != null && value > (LIMITS[figure] ?? Infinity);

/** Whether errors keep every limit; null where none is known. */
export function keeps(errors) {
  const known = Object.keys(LIMITS).filter((figure) => errors?.[figure] != null);
  return known.length ? known.every((figure) => !exceeds(figure, errors[figure])) : null;
}
