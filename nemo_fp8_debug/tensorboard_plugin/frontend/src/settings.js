// Fingerprints as rows, as in `nemo-fp8-debug compare` (analysis/runs/settings.py).

/** Settings to leave out, because they differ between any two attempts. */
const PASSED_OVER = ['attempt', 'schema_version'];

const isSection = (value) => value !== null && typeof value === 'object' && !Array.isArray(value);

/** Return pairs of a setting, `section.name`, and its value as text. */
export function flat(settings, prefix = '') {
  return Object.entries(settings)
    .filter(([name]) => prefix || !PASSED_OVER.includes(name))
    .flatMap(([name, value]) => (isSection(value) ? flat(value, `${prefix}${name}.`) : [[prefix + name, asText(value)]]));
}

/** Return a value as Python writes it, because the list of differences contains values in this form. */
export function asText(value, inside = false) {
  if (value === null) return 'None';
  if (value === true) return 'True';
  if (value === false) return 'False';
  if (Array.isArray(value)) return `[${value.map((one) => asText(one, true)).join(', ')}]`;
  if (isSection(value)) return `{${Object.entries(value).map(([key, one]) => `'${key}': ${asText(one, true)}`).join(', ')}}`;
  return inside && typeof value === 'string' ? `'${value}'` : String(value);
}
