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
