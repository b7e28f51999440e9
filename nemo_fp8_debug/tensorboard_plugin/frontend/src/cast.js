// Computes a tensor's metrics under a format and a scale from its histogram. numerics/metrics.py has the same definitions.

const INFINITY = {bfloat16: 0x7f80, float16: 0x7c00};
/**
 * With a float32 scale computed from the amax, the scaled amax may exceed the format's max by one unit in the last place.
 */
const SCALE_ROUNDING = 1 + 2 ** -22;
const LARGEST = Math.fround(2 ** 128 * (1 - 2 ** -24));

const float = new Float32Array(1);
const bits = new Uint32Array(float.buffer);

/** Return the value that a bit pattern of a 16-bit dtype represents. */
function magnitude(dtype, pattern) {
  if (dtype === 'bfloat16') {
    bits[0] = pattern << 16;
    return float[0];
  }
  const exponent = pattern >> 10;
  const mantissa = pattern & 0x3ff;
  return exponent ? (1 + mantissa / 1024) * 2 ** (exponent - 15) : mantissa * 2 ** -24;
}

/**
 * Return 2^floor(log2 x) of a float32. For a subnormal x, return 2^-127, which is below the normal values of every format.
 */
function binade(x) {
  float[0] = x;
  return 2 ** ((bits[0] >>> 23) - 127);
}

function nearestEven(x) {
  const below = Math.floor(x);
  const rest = x - below;
  return rest > 0.5 || (rest === 0.5 && below % 2) ? below + 1 : below;
}

/** Round a magnitude to a format {max, min_normal, min_subnormal}: to nearest, ties to even, at most to the format's max. */
export function cast(x, format) {
  const kept = Math.min(x, format.max);
  const spacing = Math.max(binade(kept), format.min_normal) * (format.min_subnormal / format.min_normal);
  return nearestEven(kept / spacing) * spacing;
}

/**
 * Unpack a histogram, so that sums can be computed from it.
 * @param {{dtype: string, bins: number[], counts: number[], scale: ?number}} row histogram as the server sends it
 * @returns {{values: Float64Array, counts: Float64Array, n, zeros, inf, nan, amax, power, scale}} `values`: the different
 *   finite magnitudes, ascending. `n`: number of finite values. `power`: their sum of squares.
 */
export function unpacked({dtype, bins, counts, scale}) {
  const first = bins.findIndex((bin) => bin >= INFINITY[dtype]);
  const finite = first < 0 ? bins.length : first;
  const of = {
    values: Float64Array.from({length: finite}, (_, i) => magnitude(dtype, bins[i])),
    counts: Float64Array.from(counts.slice(0, finite)),
    n: 0, zeros: 0, inf: 0, nan: 0, amax: 0, power: 0, scale,
  };
  of.values.forEach((value, i) => {
    of.n += of.counts[i];
    of.power += of.counts[i] * (value * value);
    if (value === 0) of.zeros += of.counts[i];
    else of.amax = Math.max(of.amax, value);
  });
  for (let i = finite; i < bins.length; i++) of[bins[i] === INFINITY[dtype] ? 'inf' : 'nan'] += counts[i];
  return of;
}

/** Return the scale of current scaling in float32: max / amax, or 1 for a tensor of zeros. */
export function currentScale(amax, format) {
  return amax > 0 ? Math.min(Math.fround(Math.fround(format.max) / amax), LARGEST) : 1;
}

/** Return a scale as a positive, finite float32, or null for any other value. */
export function asScale(value) {
  const scale = Math.fround(value);
  return value != null && scale > 0 && scale <= LARGEST ? scale : null;
}

const NOTHING = {underflows: 0, overflows: 0, error2: 0, xq: 0, q2: 0};

/** Return the sums over one histogram of x and q = cast(x * scale) / scale. The product x * scale is rounded to float32. */
function sums({values, counts}, scale, format) {
  const limit = Math.fround(Math.fround(format.max) * SCALE_ROUNDING);
  const total = {...NOTHING};
  for (let i = 0; i < values.length; i++) {
    const x = values[i];
    const scaled = Math.fround(x * scale);
    const q = cast(scaled, format) / scale;
    const error = x - q;
    if (x !== 0 && q === 0) total.underflows += counts[i];
    if (scaled > limit && q !== 0) total.overflows += counts[i];
    total.error2 += counts[i] * (error * error);
    total.xq += counts[i] * (x * q);
    total.q2 += counts[i] * (q * q);
  }
  return total;
}

const added = (a, b) => Object.fromEntries(Object.keys(a).map((key) => [key, a[key] + b[key]]));

/** Add up the counts of a tensor's parts, without their values. */
export const together = (parts) =>
  parts.map(({n, zeros, inf, nan, power}) => ({n, zeros, inf, nan, power})).reduce(added, {n: 0, zeros: 0, inf: 0, nan: 0, power: 0});

export const amaxOf = (parts) => Math.max(0, ...parts.map((part) => part.amax));

// If the denominator is zero, there is no ratio.
const ratio = (above, below) => (below > 0 ? above / below : null);

/**
 * Return the metrics of a tensor under a format. Each part is cast with its own scale. Metrics that are undefined are null.
 * @param {Array} parts from `unpacked`
 * @param {number[]} scales one positive and finite float32 for each part
 * @returns {object} metrics by name, and the counts that they derive from: `underflows`, `overflows` and `n`
 */
export function metricsOf(parts, scales, format) {
  const {n, power} = together(parts);
  const {underflows, overflows, error2, xq, q2} = parts.map((part, i) => sums(part, scales[i], format)).reduce(added, NOTHING);
  const square = ratio(error2, power);
  const error = square === null ? null : Math.sqrt(square);
  return {
    n, underflows, overflows,
    underflow_pct: ratio(100 * underflows, n),
    overflow_pct: ratio(100 * overflows, n),
    mse: ratio(error2, n),
    relative_error: error,
    sqnr_db: error === null ? null : -20 * Math.log10(error),
    cosine: ratio(xq, Math.sqrt(power * q2)),
  };
}

/** Return the magnitudes, before scaling, above which values are not zero, not subnormal, and clipped. */
export const windowOf = (format, scale) => ({
  zero: format.min_subnormal / 2 / scale,
  normal: format.min_normal / scale,
  max: format.max / scale,
});

/** Count values by half binades of magnitude, ascending and without gaps: [{from: log2, count}], each up to from + 1/2. */
export function histogram(parts) {
  const counts = new Map();
  for (const {values, counts: times} of parts) {
    values.forEach((value, i) => {
      if (value === 0) return;
      let exponent = Math.floor(Math.log2(value));
      if (2 ** exponent > value) exponent -= 1;
      const from = exponent + (value / 2 ** exponent >= Math.SQRT2 ? 0.5 : 0);
      counts.set(from, (counts.get(from) ?? 0) + times[i]);
    });
  }
  if (!counts.size) return [];
  const ends = [...counts.keys()];
  const low = Math.min(...ends);
  const many = (Math.max(...ends) - low) * 2 + 1;
  return Array.from({length: many}, (_, i) => ({from: low + i / 2, count: counts.get(low + i / 2) ?? 0}));
}
