// Numbers and names as people read them.

/** Three significant digits; - where there is none. */
export function number(value) {
  if (value == null || Number.isNaN(value)) return '-';
  if (value === 0) return '0';
  if (!Number.isFinite(value)) return value > 0 ? '∞' : '-∞';
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
}

/** As on an axis, where room is scarce. */
export function tick(value) {
  const size = Math.abs(value);
  const rounded = Number(value.toPrecision(4));
  return size >= 1e5 || (size > 0 && size < 1e-3) ? rounded.toExponential().replace('+', '') : String(rounded);
}

/** Five significant digits, where numbers next to each other are almost the same. */
export function precise(value) {
  if (value == null || Number.isNaN(value)) return '-';
  const size = Math.abs(value);
  return size >= 1e6 || (size > 0 && size < 1e-4) ? value.toExponential(4) : String(Number(value.toPrecision(5)));
}

/** A value in its unit, a logarithm of a ratio as the ratio. */
export const inUnit = (value, unit) => (value != null && unit === 'log2' ? 2 ** value : value);

const RAISED = {'-': '⁻', 0: '⁰', 1: '¹', 2: '²', 3: '³', 4: '⁴', 5: '⁵', 6: '⁶', 7: '⁷', 8: '⁸', 9: '⁹', '.': '·'};

/** A power of two. */
export const powerOfTwo = (exponent) => `2${[...String(Number(exponent.toFixed(2)))].map((sign) => RAISED[sign] ?? sign).join('')}`;

/** A number and its unit; a logarithm of a ratio as the ratio. */
export function withUnit(value, unit, digits = number) {
  if (value == null || Number.isNaN(value)) return '-';
  if (unit === 'log2') return `x${digits(inUnit(value, unit))}`;
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
