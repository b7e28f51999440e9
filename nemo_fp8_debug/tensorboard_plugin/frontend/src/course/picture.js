// The cells of one small multiple as a canvas; of rows that share a pixel the worst is drawn.
import {parse} from 'zrender/lib/tool/color.js';
import {colorOf} from '../color/scales.js';
import {inks} from '../theme.js';

const SHADES = 256;

/**
 * @param {{course, numbers, warmUp}} data
 * @param {number[]} tensors rows of the answer, from the top down
 * @param {[number, number]} span of steps
 * @param {number} fine pixels of the canvas in one of the page
 */
export function painted({course, numbers, warmUp}, tensors, scale, badness, [from, to], width, height, fine) {
  const [wide, high] = [Math.max(1, Math.round(width * fine)), Math.max(1, Math.round(height * fine))];
  const canvas = Object.assign(document.createElement('canvas'), {width: wide, height: high});
  const pen = canvas.getContext('2d');
  const image = pen.createImageData(wide, high);
  const pixels = new Uint32Array(image.data.buffer);
  const {bright, faint, empty} = paletteOf(scale);
  const columns = columnsOf(course.first, course.width, from, to, wide);
  const count = course.first.length;
  const colors = new Uint32Array(count);
  for (let y = 0; y < high; y += 1) {
    const begin = Math.floor((y * tensors.length) / high);
    const end = Math.max(begin + 1, Math.floor(((y + 1) * tensors.length) / high));
    if (y > 0 && tensors.length < high && begin === Math.floor(((y - 1) * tensors.length) / high)) {
      pixels.copyWithin(y * wide, (y - 1) * wide, y * wide); // the same row
      continue;
    }
    for (let j = 0; j < count; j += 1) {
      let worst = NaN;
      for (let row = begin; row < end; row += 1) {
        const number = numbers[tensors[row] * count + j];
        if (!Number.isNaN(number) && !(badness(number) <= badness(worst))) worst = number;
      }
      const share = scale.share(worst);
      colors[j] = Number.isNaN(share) ? empty : (course.first[j] <= warmUp ? faint : bright)[Math.round(share * (SHADES - 1))];
    }
    for (let x = 0; x < wide; x += 1) pixels[y * wide + x] = columns[x] < 0 ? empty : colors[columns[x]];
  }
  pen.putImageData(image, 0, 0);
  return canvas;
}

/** Of each pixel across its column: the last that has begun; -1 before the first and behind the last. */
export function columnsOf(first, width, from, to, wide) {
  const found = new Int32Array(wide).fill(-1);
  const usual = first.length > 1 ? Math.max(width, medianGap(first)) : width;
  let column = -1;
  for (let x = 0; x < wide; x += 1) {
    const step = from + ((x + 0.5) / wide) * (to - from);
    while (column + 1 < first.length && first[column + 1] <= step) column += 1;
    if (column >= 0 && (column + 1 < first.length || step <= first[column] + usual)) found[x] = column;
  }
  return found;
}

function medianGap(steps) {
  const gaps = steps.slice(1).map((step, i) => step - steps[i]).sort((a, b) => a - b);
  return gaps[gaps.length >> 1];
}

const packedColor = ([r, g, b], share, ground) => {
  const mix = (a, b_) => Math.round(share * a + (1 - share) * b_);
  return ((255 << 24) | (mix(b, ground[2]) << 16) | (mix(g, ground[1]) << 8) | mix(r, ground[0])) >>> 0;
};

/** What is left out of the limits is drawn faint. */
const FAINT = 0.35;

function paletteOf(scale) {
  const ink = inks();
  const ground = parse(ink.ground);
  const all = Array.from({length: SHADES}, (_, i) => parse(colorOf(scale, i / (SHADES - 1))));
  return {
    bright: all.map((rgb) => packedColor(rgb, 1, ground)),
    faint: all.map((rgb) => packedColor(rgb, FAINT, ground)),
    empty: packedColor(parse(ink.empty), 1, ground),
  };
}
