// Numbers and names in the form that people read.

const MINUS = '−';

/** Format a number like `format_number` in `core/text.py`: with three significant digits or more, or `-` for no number. */
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

/** Format a whole number with all of its digits. */
export const count = (value) => value.toLocaleString('en');

/** Format a number for an axis. */
export const tick = (value) => number(value, 4);

/** Format a number with five significant digits, for numbers that are nearly equal to their neighbors. */
export const precise = (value) => number(value, 5);

/** Return a value in its unit. Convert the log2 of a ratio to the ratio. */
export const inUnit = (value, unit) => (value != null && unit === 'log2' ? 2 ** value : value);

/** Format a power of two. */
export const powerOfTwo = (exponent) => `2^${number(Number(exponent.toFixed(2)), 4)}`;

/** Format a ratio, given its log2, like `format_power_of_two`. */
export function factor(exponent, digits = number) {
  if (exponent == null || Number.isNaN(exponent)) return '-';
  const isExtreme = Number.isFinite(exponent) && !(exponent >= Math.log2(1e-4) && exponent < Math.log2(1e6));
  return isExtreme ? `x2^${number(exponent)}` : `x${digits(2 ** exponent)}`;
}

/** Format a number with its unit. Convert the log2 of a ratio to the ratio. */
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

/** All roles of tensors, in order. */
export const ROLES = Object.keys(SHOWN_AS);

/** Return the usual name of a role. */
export const shown = (role) => SHOWN_AS[role] ?? role;

/** Return the usual name of a tensor. */
export const titleOf = ({layer, role}) => `${shown(role)} of ${layer}`;

/**
 * Return the index of the nearest of ascending values, the earlier of two equally near values. Return 0 if there are no
 * values.
 */
export function placeOf(values, value) {
  const after = values.findIndex((one) => one >= value);
  if (after < 0) return Math.max(0, values.length - 1);
  return after > 0 && value - values[after - 1] <= values[after] - value ? after - 1 : after;
}
