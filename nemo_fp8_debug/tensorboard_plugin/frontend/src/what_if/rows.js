// Rows of `others` and `what_if` by tensor, the limits that they are held against, and the colors of cells.

// What an operand may lose: analysis/options.Budget of the Python side, at its defaults.
export const LIMITS = {relative_error: 0.06, underflow_pct: 1, overflow_pct: 0.01};

/** Whether a metric is above its limit; of those that have one. */
export const exceeds = (metric, value) => value != null && value > (LIMITS[metric] ?? Infinity);

/** Whether errors keep every limit; null where none is known. */
export function keeps(errors) {
  const known = Object.keys(LIMITS).filter((metric) => errors?.[metric] != null);
  return known.length ? known.every((metric) => !exceeds(metric, errors[metric])) : null;
}

// Cells in the colors of a scale, and text that is read on them.
const channels = (color) => [1, 3, 5].map((at) => Number.parseInt(color.slice(at, at + 2), 16));

/** The color at a share of the way. */
function mixed(colors, part) {
  const at = part * (colors.length - 1);
  const low = Math.min(Math.floor(at), colors.length - 2);
  const [from, to] = [channels(colors[low]), channels(colors[low + 1])];
  return from.map((value, i) => Math.round(value + (to[i] - value) * (at - low)));
}

/** Relative luminance (WCAG 2.2). */
function luminance(rgb) {
  const [r, g, b] = rgb.map((value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

const WHITE_IS_READ_BETTER_BELOW = 0.179;

/** Of a cell; values that a logarithmic scale has no place for are the lowest. */
export function styleOf({share, colors}, value) {
  if (value === null) return {};
  const rgb = mixed(colors, share(value));
  return {background: `rgb(${rgb})`, color: luminance(rgb) < WHITE_IS_READ_BETTER_BELOW ? '#fff' : '#111'};
}

export const METRICS = ['relative_error', 'underflow_pct', 'overflow_pct', 'mse'];
export const IN_USE = 'in use';

/**
 * @param {Array<object>} tables columns by name, as the server sends them
 * @returns {{tensors: Array<{layer, role, by: Map<string, object>}>, recipes: Array<string>, inUse: Array<string>}}
 *   errors by recipe, `in use` for the one that was; and the names of the others, and of those in use
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

/** The least of a row, by a metric; null where there is no choice. */
export function leastOf(tensor, metric) {
  const known = [...tensor.by.values()].map((errors) => errors[metric]).filter((value) => value != null);
  const least = Math.min(...known);
  return known.some((value) => value !== least) ? least : null;
}

/** Whether values are of float32 tensors whose histograms are rounded. */
export const isAbout = (tensor, name) => Boolean(tensor.by.get(name)?.about);

export const valueOf = (tensor, name, metric) => tensor.by.get(name)?.[metric] ?? null;

/** Worst first, by the metric in use; those without it last. */
export const worstFirst = (tensors, metric) =>
  [...tensors].sort((a, b) => (valueOf(b, IN_USE, metric) ?? -1) - (valueOf(a, IN_USE, metric) ?? -1));
