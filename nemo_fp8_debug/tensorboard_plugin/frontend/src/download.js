// Files out of the page.

function save(name, url) {
  Object.assign(document.createElement('a'), {download: name.replace(/[^\w.+-]+/g, '_'), href: url}).click();
}

// A spreadsheet would run text that begins like a formula.
const cell = (value) => {
  const text = value == null || Number.isNaN(value) ? '' : String(value);
  const safe = typeof value === 'string' && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};

/** A text under the name it has, as far as a file can have it. */
export function saveText(name, text, type = 'text/plain') {
  const url = URL.createObjectURL(new Blob([text], {type}));
  save(name, url);
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Rows as comma-separated values: arrays, the first one the headings. */
export const saveCsv = (name, rows) => saveText(`${name}.csv`, rows.map((row) => row.map(cell).join(',')).join('\r\n'), 'text/csv');

export const savePng = (name, url) => save(`${name}.png`, url);
