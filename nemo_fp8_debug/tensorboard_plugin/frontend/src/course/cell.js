// Which cell of Course is where: {tensor, panel, place, column, step, value, number, last, samples}.
import {LEFT, RIGHT} from './option.js';
import {columnsOf} from './picture.js';

/** The step at a place across. */
export const stepAt = (x, width, [from, to]) => from + ((x - LEFT) / (width - LEFT - RIGHT)) * (to - from);

function made({course, numbers}, multiples, panel, place, column) {
  const row = multiples[panel].tensors[place];
  const at = row * course.first.length + column;
  return {
    tensor: {layer: course.layer[row], role: course.role[row]}, panel, place, column, step: course.first[column], last: course.last[column],
    samples: course.samples[column], value: course.values[at], number: numbers[at],
  };
}

/** The cell at a place of the picture; null where there is none. */
export function cellAt({x, y, width}, {data, multiples, places, span}) {
  const panel = places.maps.findIndex(({top, height}) => y >= top && y < top + height);
  const wide = width - LEFT - RIGHT;
  const across = Math.floor(x - LEFT);
  if (panel < 0 || across < 0 || across >= wide) return null;
  const column = columnsOf(data.course.first, data.course.width, ...span, Math.round(wide))[across];
  if (column === undefined || column < 0) return null;
  const {top, height} = places.maps[panel];
  return made(data, multiples, panel, Math.floor(((y - top) / height) * multiples[panel].tensors.length), column);
}

/** The cell of a tensor at a step or before; null where there is none. */
export function cellOf(data, multiples, {layer, role}, step) {
  const {course} = data;
  const panel = multiples.findIndex((one) => one.role === role);
  const place = panel < 0 ? -1 : multiples[panel].tensors.findIndex((row) => course.layer[row] === layer);
  if (place < 0 || !course.first.length) return null;
  const column = course.first.findLastIndex((first) => first <= step);
  return made(data, multiples, panel, place, Math.max(0, column));
}

const MOVES = {ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0]};

/** The cell that a key moves to; from nowhere the first; null for other keys and beyond the ends. */
export function moved(data, multiples, cell, key) {
  const by = MOVES[key];
  const count = data.course.first.length;
  if (!by || !count || !multiples.length) return null;
  if (!cell) return made(data, multiples, 0, 0, 0);
  const column = cell.column + by[0];
  if (column < 0 || column >= count) return null;
  const all = multiples.flatMap(({tensors}, panel) => tensors.map((_, place) => [panel, place]));
  const next = all[all.findIndex(([panel, place]) => panel === cell.panel && place === cell.place) + by[1]];
  return next ? made(data, multiples, ...next, column) : null;
}
