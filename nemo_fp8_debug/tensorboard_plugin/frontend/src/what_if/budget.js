// What an operand may lose: analysis/options.Budget of the Python side, at its defaults.

export const LIMITS = {relative_error: 0.06, underflow_pct: 1, overflow_pct: 0.01};

/** Whether a metric is above its limit; of those that have one. */
export const exceeds = (metric, value) => value != null && value > (LIMITS[metric] ?? Infinity);

/** Whether errors keep every limit; null where none is known. */
export function keeps(errors) {
  const known = Object.keys(LIMITS).filter((metric) => errors?.[metric] != null);
  return known.length ? known.every((metric) => !exceeds(metric, errors[metric])) : null;
}
