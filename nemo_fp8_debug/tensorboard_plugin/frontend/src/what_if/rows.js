// Rows of `others` and `what_if` by tensor, the limits for their errors, and the colors of cells.

// Largest errors of an operand: the defaults of `Budget` in analysis/recommendation/options.py.
export const LIMITS = {relative_error: 0.06, underflow_pct: 1, overflow_pct: 0.01};

/** Return whether a metric is above its limit. Return false for metrics without a limit. */
export const exceeds = (metric, value) => value != null && value > (LIMITS[metric] ?? Infinity);

/** Return whether errors keep every limit, or null if no error is known. */
export function keeps(errors) {
  const known = Object.keys(LIMITS).filter((metric) => errors?.[metric] != null);
  return known.length ? known.every((metric) => !exceeds(metric, errors[metric])) : null;
}

// The colors of cells, and of readable text on them.
const channels = (color) => [1, 3, 5].map((at) => Number.parseInt(color.slice(at, at + 2), 16));

/** Return the color at a place of a color ramp, from 0 to 1. */
function mixed(colors, part) {
  const at = part * (colors.length - 1);
  const low = Math.min(Math.floor(at), colors.length - 2);
  const [from, to] = [channels(colors[low]), channels(colors[low + 1])];
  return from.map((value, i) => Math.round(value + (to[i] - value) * (at - low)));
}

/** Return the relative luminance (WCAG 2.2). */
function luminance(rgb) {
  const [r, g, b] = rgb.map((value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

const WHITE_IS_READ_BETTER_BELOW = 0.179;

/** Return the style of a cell. On a logarithmic scale, values that have no logarithm get the color of the lowest values. */
export function styleOf({share, colors}, value) {
  if (value === null) return {};
  const rgb = mixed(colors, share(value));
  return {background: `rgb(${rgb})`, color: luminance(rgb) < WHITE_IS_READ_BETTER_BELOW ? '#fff' : '#111'};
}

export const METRICS = ['relative_error', 'underflow_pct', 'overflow_pct', 'mse'];
export const IN_USE = 'in use';

/**
 * @param {Array<object>} tables answers of the server: columns by name
 * @returns {{tensors: Array<{layer, role, by: Map<string, object>}>, recipes: Array<string>, inUse: Array<string>}}
 *   `by`: errors by recipe, with the name `in use` for the recipe in use. `recipes`: names of the other
 *   recipes. `inUse`: names of the recipes in use.
 */
export function byTensor(tables) {
  const tensors = new Map();
  const others = new Set();
  const inUse = new Set();
  for (const table of tables) {
    table.layer.forEach((layer, i) => {
      const [role, recipe] = [table.role[i], table.recipe[i]];
      const key = `${layer} ${role}`;
      if (!tensors.has(key)) tensors.set(key, {layer, role, by: new Map()});
      const name = table.in_use?.[i] ? IN_USE : recipe;
      (table.in_use?.[i] ? inUse : others).add(recipe);
      tensors.get(key).by.set(name, {recipe, about: Boolean(table.rounded?.[i]), ...Object.fromEntries(METRICS.map((metric) => [metric, table[metric][i]]))});
    });
  }
  return {tensors: [...tensors.values()], recipes: [...others], inUse: [...inUse]};
}

/** Return the lowest value of a metric in a tensor's row, or null if all values are equal or unknown. */
export function leastOf(tensor, metric) {
  const known = [...tensor.by.values()].map((errors) => errors[metric]).filter((value) => value != null);
  const least = Math.min(...known);
  return known.some((value) => value !== least) ? least : null;
}

/** Return whether values are approximate, because they come from rounded histograms of float32 tensors. */
export const isAbout = (tensor, name) => Boolean(tensor.by.get(name)?.about);

export const valueOf = (tensor, name, metric) => tensor.by.get(name)?.[metric] ?? null;

/** Sort tensors by their value under the recipe in use, worst first. Tensors without a value come last. */
export const worstFirst = (tensors, metric) =>
  [...tensors].sort((a, b) => (valueOf(b, IN_USE, metric) ?? -1) - (valueOf(a, IN_USE, metric) ?? -1));
