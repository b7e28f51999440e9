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
