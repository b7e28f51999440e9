// Numbers and names as people read them.

const MINUS = '−';

/** As `format_number` of `core/text.py` writes it: three significant digits, or more; `-` for an absent number. */
export function number(value, digits = 3, signed = false) {
  if (value == null || Number.isNaN(value)) return '-';
  const sign = value < 0 ? MINUS : signed && value > 0 ? '+' : '';
  return `${sign}${sized(Math.abs(value), digits)}`;
}

function sized(size, digits) {
  if (!Number.isFinite(size)) return 'inf';
  if (Number.isInteger(Math.log2(size)) && !(size >= 1e-3 && size < 1e4)) return `2^${Math.log2(size)}`.replace('-', MINUS);
  if (size && !(size >= 1e-4 && size < 1e6)) {
    const [digit, power] = size.toExponential(digits - 1).split('e');
    return `${Number(digit)}e${Number(power)}`.replace('-', MINUS);
  }
  return size.toLocaleString('en', size >= 10 ** (digits - 1) ? {maximumFractionDigits: 0} : {maximumSignificantDigits: digits});
}

/** A whole number with all of its digits. */
export const count = (value) => value.toLocaleString('en');

/** As on an axis, where room is scarce. */
export const tick = (value) => number(value, 4);

/** Five significant digits, where numbers next to each other are almost the same. */
export const precise = (value) => number(value, 5);

/** A value in its unit, a logarithm of a ratio as the ratio. */
export const inUnit = (value, unit) => (value != null && unit === 'log2' ? 2 ** value : value);

/** A power of two. */
export const powerOfTwo = (exponent) => `2^${number(Number(exponent.toFixed(2)), 4)}`;

/** A ratio by its log2, as `format_power` writes it. */
export function factor(exponent, digits = number) {
  if (exponent == null || Number.isNaN(exponent)) return '-';
  const isExtreme = Number.isFinite(exponent) && !(exponent >= Math.log2(1e-4) && exponent < Math.log2(1e6));
  return isExtreme ? `x2^${number(exponent)}` : `x${digits(2 ** exponent)}`;
}

/** A number and its unit; a logarithm of a ratio as the ratio. */
export function withUnit(value, unit, digits = number) {
  if (value == null || Number.isNaN(value)) return '-';
  if (unit === 'log2') return factor(value, digits);
  return `${digits(value)}${unit === '%' ? '' : ' '}${unit ?? ''}`.trim();
}

const SHOWN_AS = {
  input: 'X', weight: 'W', grad_output: 'dY',
  query: 'Q', key: 'K', value: 'V', probabilities: 'S', context: 'O',
  grad_context: 'dO', grad_scores: 'dP', grad_query: 'dQ', grad_key: 'dK', grad_value: 'dV',
  weight_gradient: 'dW', first_moment: 'm', second_moment: 'v', master_weight: 'master W', update: 'step of W',
  norm_input: 'input', norm_output: 'output', router_logits: 'logits', attention_logits: 'logits',
};

/** Every role of an operand, in order. */
export const ROLES = Object.keys(SHOWN_AS);

/** An operand's role as people write it. */
export const shown = (role) => SHOWN_AS[role] ?? role;

/** A tensor in words. */
export const titleOf = ({layer, role}) => `${shown(role)} of ${layer}`;

/** The place of the nearest of ascending values, of two the earlier; 0 where there is none. */
export function placeOf(values, value) {
  const after = values.findIndex((one) => one >= value);
  if (after < 0) return Math.max(0, values.length - 1);
  return after > 0 && value - values[after - 1] <= values[after] - value ? after - 1 : after;
}
