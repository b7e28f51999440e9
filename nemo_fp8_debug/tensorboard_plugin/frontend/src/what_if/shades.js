// Cells in the colours of a scale, and text that is read on them.

const channels = (colour) => [1, 3, 5].map((at) => Number.parseInt(colour.slice(at, at + 2), 16));

/** The colour at a share of the way. */
function mixed(colours, part) {
  const at = part * (colours.length - 1);
  const low = Math.min(Math.floor(at), colours.length - 2);
  const [from, to] = [channels(colours[low]), channels(colours[low + 1])];
  return from.map((value, i) => Math.round(value + (to[i] - value) * (at - low)));
}

/** Relative luminance (WCAG 2.2). */
function luminance(rgb) {
  const [r, g, b] = rgb.map((value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

const WHITE_IS_READ_BETTER_BELOW = 0.179;

/** What `scaleOf` asks of values. */
export const extentOf = (values) => ({
  low: values.reduce((least, value) => Math.min(least, value), Infinity),
  high: values.reduce((most, value) => Math.max(most, value), -Infinity),
  positive: values.reduce((least, value) => (value > 0 ? Math.min(least, value) : least), Infinity),
});

/** Of a cell; values that a logarithmic scale has no place for are the lowest. */
export function styleOf({to, low, high, colours}, value) {
  if (value === null) return {};
  const part = Math.min(1, Math.max(0, (to(value) - low) / (high - low))) || 0;
  const rgb = mixed(colours, part);
  return {background: `rgb(${rgb})`, color: luminance(rgb) < WHITE_IS_READ_BETTER_BELOW ? '#fff' : '#111'};
}
