// Rows of `others` and `what_if`, a row a tensor and recipe, as a row a tensor.

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
