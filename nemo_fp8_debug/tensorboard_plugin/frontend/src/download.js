// Saves files from the page.

function save(name, url) {
  Object.assign(document.createElement('a'), {download: name.replace(/[^\w.+-]+/g, '_'), href: url}).click();
}

// Protect text that begins like a formula, because a spreadsheet would evaluate it.
const cell = (value) => {
  const text = value == null || Number.isNaN(value) ? '' : String(value);
  const safe = typeof value === 'string' && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};

/** Save a text. Replace characters of its name that file names cannot have. */
export function saveText(name, text, type = 'text/plain') {
  const url = URL.createObjectURL(new Blob([text], {type}));
  save(name, url);
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Save rows, which are arrays, as comma-separated values. The first row has the headings. */
export const saveCsv = (name, rows) => saveText(`${name}.csv`, rows.map((row) => row.map(cell).join(',')).join('\r\n'), 'text/csv');

export const savePng = (name, url) => save(`${name}.png`, url);
