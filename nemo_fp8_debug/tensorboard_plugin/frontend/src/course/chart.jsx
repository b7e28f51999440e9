// The picture of Course: small multiples drawn in pixels between axes. A click selects, a drag zooms, arrow keys move.
import Image from 'zrender/lib/graphic/Image.js';
import Rect from 'zrender/lib/graphic/shape/Rect.js';
import {useSignal} from '@preact/signals';
import {useEffect, useMemo, useRef} from 'preact/hooks';
import {parse} from 'zrender/lib/tool/color.js';
import {go, tensor, toTensor} from '../address.js';
import {colorOf} from '../color/scales.js';
import {axis, Chart, tip, tooltip} from '../components/chart.jsx';
import {Under} from '../map/panel.jsx';
import {drawnAs} from '../runs/beside.js';
import {COLORS, dark, inks} from '../theme.js';
import {number, tick, titleOf} from '../units.js';

// The axes of Course: charts of the run's scalars above, a small multiple for each role below, and one axis of steps for
// all.
export const [LEFT, RIGHT] = [150, 20];
const [TOP, GAP, BOTTOM, LEAST] = [40, 30, 44, 96];
/** Pixels between two charts of scalars, and largest width of the titles next to them. */
const [APART, TITLE] = [12, 96];
/** Height of a chart of scalars: as a share of the window's height, and the least and the largest height in pixels. */
const [LINES, LOWEST, HIGHEST] = [0.04, 28, 90];
/** Height of a name in pixels. */
const NAME = 10;
/** Share of the window's height for the small multiples. */
const SHARE = 0.5;

/** Return {lines, maps, height}: the {top, height} of each panel and the height of all, in pixels. */
export function placesOf(lines, multiples) {
  const rows = multiples.reduce((sum, {tensors}) => sum + tensors.length, 0);
  const share = ({tensors}) => Math.round(Math.max(LEAST, Math.min((SHARE * window.innerHeight * tensors.length) / rows, 34 * tensors.length)));
  let top = TOP;
  const take = (height, gap = GAP) => {
    const place = {top, height};
    top += height + gap;
    return place;
  };
  const found = {lines: lines.map((_, i) => take(Math.round(Math.max(LOWEST, Math.min(LINES * window.innerHeight, HIGHEST))), i + 1 < lines.length ? APART : GAP)), maps: multiples.map((one) => take(share(one)))};
  return {...found, height: top - GAP + BOTTOM};
}

/**
 * @param {Array} lines result of `linesOf`
 * @param {Array<{step, label, kind}>} marks steps at which the loss or a tensor departs
 */
export function optionOf({lines, multiples, places, span, marks, step, names}) {
  const [from, to] = span;
  const ink = inks();
  const all = [...places.lines, ...places.maps];
  const last = all.length - 1;
  const title = (text, i, by = -24, more = {}) => ({text, left: 4, top: all[i].top + by, textStyle: {fontSize: 12, fontWeight: 600, color: ink.text, ...more}});
  const beside = {width: TITLE, overflow: 'break', lineHeight: 14};
  return {
    title: [...lines.map((panel, i) => title(brief(panel), i, -6, beside)), ...multiples.map(({label}, i) => title(label, lines.length + i))],
    grid: all.map(({top, height}) => ({left: LEFT, right: RIGHT, top, height, outerBoundsMode: 'none'})),
    xAxis: all.map((_, i) => axis({
      type: 'value', gridIndex: i, min: from, max: Math.max(to, from + 1), minInterval: 1, splitLine: {show: false},
      axisLabel: {show: i === last}, name: i === last ? 'step' : '', nameLocation: 'middle', nameGap: 24, axisPointer: {label: {show: i === last, formatter: ({value}) => `step ${Math.round(value)}`}},
    })),
    yAxis: [
      ...lines.map(({log, ...panel}, i) => axis({type: log ? 'log' : 'value', gridIndex: i, scale: true, splitNumber: all[i].height < 40 ? 1 : 2, ...(log ? decadesOf(panel) : {}), axisLabel: {formatter: log ? endsOf(panel) : tick, hideOverlap: true}})),
      ...multiples.map(({names: rows}, i) => axis({type: 'category', data: legible(rows, all[lines.length + i].height), inverse: true, gridIndex: lines.length + i, splitLine: {show: false}, axisTick: {show: false}, axisLabel: {width: LEFT - 12, overflow: 'truncate', fontSize: 10, interval: 0}, axisPointer: {show: false}})),
    ],
    axisPointer: {link: [{xAxisIndex: 'all'}], lineStyle: {color: ink.soft}},
    tooltip: tooltip({trigger: 'axis', formatter: (found) => told([found].flat(), lines, names)}),
    series: [
      ...lines.flatMap((panel, i) => panel.lines.map((line, j) => ({
        type: 'line', id: `${panel.name} ${line.part}`, xAxisIndex: i, yAxisIndex: i, data: line.step.map((at, k) => [at, panel.log && line.values[k] <= 0 ? null : line.values[k]]), showSymbol: false,
        ...drawnAs(line.part), markLine: j ? undefined : markLine(marks, step, span, ink, i === 0),
      }))),
      ...multiples.map((_, i) => ({type: 'line', id: `map ${i}`, xAxisIndex: lines.length + i, yAxisIndex: lines.length + i, data: [], tooltip: {show: false}, markLine: markLine(marks, step, span, ink, lines.length === 0 && i === 0)})),
    ],
  };
}

/** Return a short title of a scalar's chart, with the kind of its axis. */
const brief = ({label, log, left}) => [label, log && 'log', left > 0 && 'without 0'].filter(Boolean).join(', ');

/** Return as many names as there is room for, evenly spread. ECharts would need long to choose among thousands of names. */
function legible(rows, height) {
  const every = Math.ceil((NAME * rows.length) / height);
  return rows.filter((_, i) => i % every === 0);
}

/** Return the powers of ten around the values, as limits of an axis. */
function decadesOf({lines}) {
  const values = lines.flatMap((line) => line.values.filter((value) => value > 0));
  return {min: 10 ** Math.floor(Math.log10(Math.min(...values))), max: 10 ** Math.ceil(Math.log10(Math.max(...values)))};
}

/** Return a formatter that labels only the ends of an axis, because labels of the decades in between would overlap. */
function endsOf(panel) {
  const ends = Object.values(decadesOf(panel));
  return (value) => (ends.some((end) => Math.abs(Math.log10(value / end)) < 1e-6) ? tick(value) : '');
}

function markLine(marks, step, [from, to], ink, labeled) {
  const data = marks.map(({step: at, label, kind}, i) => ({
    xAxis: at, lineStyle: {color: kind === 'loss' ? COLORS.run : COLORS.mark, type: kind === 'loss' ? 'solid' : 'dashed', width: 2},
    label: {show: labeled, formatter: label, position: 'end', distance: 3 + 13 * i, color: ink.text, align: at > (from + to) / 2 ? 'right' : 'left', fontSize: 11},
  }));
  if (step !== null) data.push({xAxis: step, lineStyle: {color: ink.text, type: 'dotted', width: 1}, label: {show: false}});
  return {silent: true, symbol: 'none', animation: false, data};
}

function told(found, lines, names) {
  const seen = found.filter(({seriesId}) => !seriesId.startsWith('map '));
  if (!seen.length) return '';
  const told = seen.map(({seriesId, value: [at, value]}) => {
    const panel = lines.find(({name}) => seriesId.startsWith(`${name} `));
    return `${panel.label}, ${names[seriesId.slice(panel.name.length + 1)]}: ${number(value)} at step ${at}`;
  });
  return tip(...told);
}

// Draws the cells of one small multiple on a canvas. If several rows share a pixel, the worst is drawn.
const SHADES = 256;

/**
 * @param {{course, numbers, warmUp}} data
 * @param {number[]} tensors indices of rows in the answer, from top to bottom
 * @param {[number, number]} span of steps
 * @param {number} fine pixels of the canvas for each pixel of the page
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

/**
 * Return the column of each horizontal pixel: the last column that begins at or before the pixel. Return -1 before the first
 * column and after the end of the last.
 */
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

/** Opacity of the warm-up, which does not affect the limits. */
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

// The cells of Course: {tensor, panel, place, column, step, value, number, last, samples}.
/** Return the step at a horizontal position in pixels. */
export const stepAt = (x, width, [from, to]) => from + ((x - LEFT) / (width - LEFT - RIGHT)) * (to - from);

function made({course, numbers}, multiples, panel, place, column) {
  const row = multiples[panel].tensors[place];
  const at = row * course.first.length + column;
  return {
    tensor: {layer: course.layer[row], role: course.role[row]}, panel, place, column, step: course.first[column], last: course.last[column],
    samples: course.samples[column], value: course.values[at], number: numbers[at],
  };
}

/** Return the cell at a position of the picture, or null if there is no cell. */
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

/** Return the last cell of a tensor that begins at or before a step, or its first cell. Return null without the tensor. */
export function cellOf(data, multiples, {layer, role}, step) {
  const {course} = data;
  const panel = multiples.findIndex((one) => one.role === role);
  const place = panel < 0 ? -1 : multiples[panel].tensors.findIndex((row) => course.layer[row] === layer);
  if (place < 0 || !course.first.length) return null;
  const column = course.first.findLastIndex((first) => first <= step);
  return made(data, multiples, panel, place, Math.max(0, column));
}

const MOVES = {ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0]};

/**
 * Return the cell that a key moves to, or the first cell if none is selected. Return null for other keys and beyond the
 * ends.
 */
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

/** Least movement in pixels that counts as a drag. */
const DRAG = 5;

/**
 * @param {object} data from `useCourse`
 * @param {Array} multiples result of `multiplesOf`
 * @param {function} tell function that describes a cell in words
 * @param {number} step selected step
 */
export function CourseChart({data, multiples, lines, marks, span, scale, badness, names, tell, step, label, mark, rows}) {
  const box = useRef();
  const zr = useRef();
  const under = useSignal(null);
  const drag = useSignal(null);
  const places = useMemo(() => placesOf(lines, multiples), [lines, multiples, window.innerHeight]);
  const option = useMemo(() => optionOf({lines, multiples, places, span, marks, step, names}), [lines, multiples, places, JSON.stringify(span), JSON.stringify(marks), step, dark.value]);
  const cell = tensor.value && cellOf(data, multiples, tensor.value, step);
  const look = useRef();
  look.current = {data, multiples, places, span};

  const images = useMemo(() => [], [data, scale, multiples]);
  const repaint = () => {
    const chart = zr.current;
    if (!chart) return;
    const width = chart.chart.getWidth() - LEFT - RIGHT;
    if (width <= 0) return;
    multiples.forEach(({tensors}, i) => {
      const {top, height} = places.maps[i];
      if (images[i]?.wide !== width || images[i]?.high !== height) images[i] = {wide: width, high: height, image: painted(data, tensors, scale, badness, span, width, height, window.devicePixelRatio)};
      chart.pictures[i] ??= added(chart.chart, new Image({silent: true, zlevel: -1, style: {}}));
      chart.pictures[i].attr({style: {image: images[i].image, x: LEFT, y: top, width, height}});
    });
    const at = cell && outline(cell, {data, multiples, places, span}, width);
    chart.chosen.attr({invisible: !at, shape: at ?? {}});
  };
  const ready = (chart) => {
    const chosen = added(chart, new Rect({silent: true, invisible: true, z: 9, style: {fill: 'none', stroke: COLORS.mark, lineWidth: 2.5}}));
    zr.current = {chart, pictures: [], chosen};
    repaint();
  };
  useEffect(repaint);

  const placeOf = (event) => {
    const {left, top, width} = box.current.querySelector('.chart-box').getBoundingClientRect();
    return {x: event.clientX - left, y: event.clientY - top, width};
  };
  const inside = ({x, width}) => Math.min(width - RIGHT, Math.max(LEFT, x));
  const down = (event) => {
    const place = placeOf(event);
    if (event.target.tagName === 'CANVAS' && place.x >= LEFT && place.x <= place.width - RIGHT) drag.value = {from: place.x, to: place.x};
  };
  const move = (event) => {
    const place = placeOf(event);
    if (drag.value) drag.value = {...drag.value, to: inside(place)};
    under.value = event.target.tagName === 'CANVAS' && !drag.value ? place : null;
  };
  const up = (event) => {
    const dragged = drag.value;
    drag.value = null;
    if (!dragged) return;
    const place = placeOf(event);
    if (Math.abs(dragged.to - dragged.from) >= DRAG) {
      const ends = [dragged.from, dragged.to].map((x) => Math.round(stepAt(x, place.width, span))).sort((a, b) => a - b);
      if (ends[0] < ends[1]) go({from: ends[0], to: ends[1]}, true);
      return;
    }
    const found = cellAt(place, look.current);
    go(found ? toTensor(found.tensor, {step: found.step}) : {step: Math.round(stepAt(place.x, place.width, span))});
  };
  const keys = (event) => {
    if (event.target !== event.currentTarget) return;
    if (event.key === 'Enter' && tensor.value) go({view: 'timeline'}, true);
    const next = moved(data, multiples, cell, event.key);
    if (!next) return;
    event.preventDefault();
    go(toTensor(next.tensor, {step: next.step}));
  };
  const now = under.value && cellAt(under.value, look.current);
  return (
    <div ref={box} class="keyed" tabIndex={0} role="group" aria-label={`${label} Arrow keys move over the map, Enter opens the timeline.`} onKeyDown={keys}>
      <div class="pointed" onMouseDown={down} onMouseMove={move} onMouseUp={up} onMouseLeave={() => (under.value = drag.value = null)}>
        <Chart name="course" label={label} height={places.height} option={option} mark={mark} ready={ready} resized={repaint} rows={rows} />
        {drag.value && <div class="brush" style={{left: `${Math.min(drag.value.from, drag.value.to)}px`, width: `${Math.abs(drag.value.to - drag.value.from)}px`}} />}
        {now && <Under {...under.value}><b>{titleOf(now.tensor)}</b><br />{tell(now)}</Under>}
      </div>
      <span class="unseen" aria-live="polite">{cell ? `${titleOf(cell.tensor)}, ${tell(cell)}` : ''}</span>
    </div>
  );
}

function added(chart, element) {
  chart.getZr().add(element);
  return element;
}

/** Return the outline of a cell in pixels of the chart, or null if the cell is outside the span. */
function outline({panel, place, column}, {data: {course}, multiples, places, span: [from, to]}, width) {
  const {top, height} = places.maps[panel];
  const high = height / multiples[panel].tensors.length;
  const begin = LEFT + ((course.first[column] - from) / (to - from)) * width;
  const end = LEFT + (((course.first[column + 1] ?? course.first[column] + course.width) - from) / (to - from)) * width;
  if (begin < LEFT - 1 || begin > LEFT + width) return null;
  return {x: begin - 1, y: top + place * high - 1, width: Math.max(4, Math.min(end, LEFT + width) - begin), height: Math.max(4, high)};
}
