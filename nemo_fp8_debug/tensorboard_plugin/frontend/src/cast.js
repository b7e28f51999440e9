// What a format and a scale make of a tensor, from its histogram; the definitions are those of numerics/metrics.py.

const INFINITY = {bfloat16: 0x7f80, float16: 0x7c00};
/** A float32 scale made from the amax may carry the amax itself past the format's max by one unit in the last place. */
const SCALE_ROUNDING = 1 + 2 ** -22;
const LARGEST = Math.fround(2 ** 128 * (1 - 2 ** -24));

const float = new Float32Array(1);
const bits = new Uint32Array(float.buffer);

/** The value that a pattern of a 16-bit dtype stands for. */
function magnitude(dtype, pattern) {
  if (dtype === 'bfloat16') {
    bits[0] = pattern << 16;
    return float[0];
  }
  const exponent = pattern >> 10;
  const mantissa = pattern & 0x3ff;
  return exponent ? (1 + mantissa / 1024) * 2 ** (exponent - 15) : mantissa * 2 ** -24;
}

/** 2^floor(log2 x) of a float32; at most 2^-127 of a subnormal one, which no format calls normal. */
function binade(x) {
  float[0] = x;
  return 2 ** ((bits[0] >>> 23) - 127);
}

function nearestEven(x) {
  const below = Math.floor(x);
  const rest = x - below;
  return rest > 0.5 || (rest === 0.5 && below % 2) ? below + 1 : below;
}

/** A magnitude rounded to a format {max, min_normal, min_subnormal}: to nearest, ties to even, never past its max. */
export function cast(x, format) {
  const kept = Math.min(x, format.max);
  const spacing = Math.max(binade(kept), format.min_normal) * (format.min_subnormal / format.min_normal);
  return nearestEven(kept / spacing) * spacing;
}

/**
 * A histogram ready for sums.
 * @param {{dtype: string, bins: number[], counts: number[], scale: ?number}} row as the server gives it
 * @returns {{values: Float64Array, counts: Float64Array, n, zeros, inf, nan, amax, power, scale}} finite magnitudes ascending;
 *   n of them, their sum of squares in `power`
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

/** The scale of current scaling: max / amax, float32; 1 of a tensor of zeros. */
export function currentScale(amax, format) {
  return amax > 0 ? Math.min(Math.fround(Math.fround(format.max) / amax), LARGEST) : 1;
}

/** A scale as what casts holds it: a positive, finite float32; null of anything else. */
export function asScale(value) {
  const scale = Math.fround(value);
  return value != null && scale > 0 && scale <= LARGEST ? scale : null;
}

const NOTHING = {underflows: 0, overflows: 0, error2: 0, xq: 0, q2: 0};

/** Sums of one histogram x against q = cast(x * scale) / scale; products with the scale are float32's. */
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

/** Parts of a tensor together, without their values. */
export const together = (parts) =>
  parts.map(({n, zeros, inf, nan, power}) => ({n, zeros, inf, nan, power})).reduce(added, {n: 0, zeros: 0, inf: 0, nan: 0, power: 0});

export const amaxOf = (parts) => Math.max(0, ...parts.map((part) => part.amax));

// A ratio with a zero below is absent, not infinite.
const ratio = (above, below) => (below > 0 ? above / below : null);

/**
 * The metrics of a tensor under a format, each part of it cast with its own scale; null for what cannot be had.
 * @param {Array} parts from `unpacked`
 * @param {number[]} scales positive and finite float32, one a part
 * @returns {object} the metrics by name, and the counts `underflows`, `overflows` and `n` behind them
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

/** Magnitudes under a scale: from which on they are not zero, subnormal no more, and clipped. */
export const windowOf = (format, scale) => ({
  zero: format.min_subnormal / 2 / scale,
  normal: format.min_normal / scale,
  max: format.max / scale,
});

/** Values by half binades of magnitude, ascending and without gaps: [{from: log2, count}], each up to from + 1/2. */
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
