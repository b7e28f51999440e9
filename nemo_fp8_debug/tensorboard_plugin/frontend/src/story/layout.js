// Where events lie on the strip: a row a kind, a place a step, and labels that do not overlap.

/** Pixels: a row's height, a mark's width, and the room between two labels. */
export const ROW = 26;
const MARK = 15;
const BETWEEN = 8;
const ROOM = 160;

const ruler = document.createElement('canvas').getContext('2d');

export function widthOf(text) {
  ruler.font = '12px Roboto, system-ui, sans-serif';
  return ruler.measureText(text).width;
}

/**
 * Marks by row: events of a row that share a place are one.
 * @param {Array<{step, kind, what, row}>} events in order
 * @param {string[]} rows
 * @param {number} width pixels of the axis
 * @returns {Array<{row, marks: Array<{x, events, label: ?{x, text, end: boolean}}>}>}
 */
export function laidOut(events, rows, width) {
  const place = scaleOf(events, width);
  return rows.map((row) => ({row, marks: labeled(together(events.filter((event) => event.row === row), place), width)}));
}

/** Steps to pixels, with room at either end for the labels of what comes first and last. */
export function scaleOf(events, width) {
  const first = events[0].step;
  const last = events[events.length - 1].step;
  const room = Math.max(MARK, Math.min(ROOM, width / 5));
  return (step) => (last === first ? width / 2 : room + ((width - 2 * room) * (step - first)) / (last - first));
}

function together(events, place) {
  const marks = [];
  for (const event of events) {
    const x = place(event.step);
    const before = marks[marks.length - 1];
    if (before && x - before.x < MARK) before.events.push(event);
    else marks.push({x, events: [event]});
  }
  return marks;
}

/** Each label right of its mark, or else left of it, where there is room. */
function labeled(marks, width) {
  let taken = 0;
  return marks.map((mark, i) => {
    const text = textOf(mark.events);
    const long = widthOf(text) + BETWEEN;
    const next = i + 1 < marks.length ? marks[i + 1].x - MARK / 2 : width;
    const right = mark.x + MARK / 2 + 2;
    const left = mark.x - MARK / 2 - 2;
    const before = taken;
    taken = mark.x + MARK / 2;
    if (right + long <= next) {
      taken = right + long;
      return {...mark, label: {x: right, text, end: false}};
    }
    return {...mark, label: left - long >= before ? {x: left, text, end: true} : null};
  });
}

const LAYERS = /^(?:.*\.)?layers\.(\d+)\.(?:.*\.)?([^.]+)$/;

/** The end of a layer's name, which tells it from others. */
const short = (layer) => layer.replace(LAYERS, '$1.$2');

function textOf(events) {
  const [{layer, what, step}] = events;
  const tensors = new Set(events.map((event) => event.layer && `${event.role} ${event.layer}`));
  if (tensors.size === 1 && layer) return short(layer);
  if (events.length === 1) return `${what.replace(/^the /, '')}, ${step}`;
  return tensors.has(null) ? `${events.length} events` : `${tensors.size} tensors`;
}

/** Steps to be written below the axis, at most one for 90 pixels. */
export function ticksOf(events, width) {
  const [first, last] = [events[0].step, events[events.length - 1].step];
  const wanted = Math.max(1, Math.floor(width / 90));
  const rough = Math.max(1, (last - first) / wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const by = Math.max(1, [1, 2, 5, 10].map((times) => times * power).find((one) => one >= rough));
  const ticks = [];
  for (let at = Math.ceil(first / by) * by; at <= last; at += by) ticks.push(at);
  return ticks.length ? ticks : [first];
}
