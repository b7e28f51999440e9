// ECharts' option for the chart of a distribution.
import {windowOf} from '../cast.js';
import {axis, tip, tooltip} from '../components/chart.jsx';
import {COLORS, inks} from '../theme.js';
import {count, number, powerOfTwo, precise, tick} from '../units.js';

const HALF = 0.5;
const BESIDE = 2;
/** Number of powers of two that the axis shows beyond the windows. */
const FAR = 22;
/** Distance of the plot from each side of its chart, in pixels. */
export const PLOT = {left: 70, right: 25, top: 84, bottom: 44};
/** Distance of the windows above the plot, in pixels: of the cast in use, and of the cast to try. */
const [IN_USE, TRIED] = [46, 14];
/** Height of the strip with labels, below the top of the plot. */
const LABELS = 26;
const GRIP = {width: 30, height: 18};
/** Distance above the plot, in pixels, up to which the user can grab the window. */
export const REACH_PX = TRIED + GRIP.height;
const NOT_DRAWN = {tooltip: {show: false}, silent: true, clip: false};

const log2WindowOf = ({format, scale}) => {
  const {zero, normal, max} = windowOf(format, scale);
  return {zero: Math.log2(zero), normal: Math.log2(normal), max: Math.log2(max)};
};

/**
 * Return the limits [low, high] of the axis as powers of two. It contains all windows and the bars near them, or all bars if
 * `whole`.
 */
export function rangeOf(bars, cuts, whole) {
  const windows = cuts.filter(({scale}) => scale !== null).map(log2WindowOf);
  const low = Math.min(...windows.map(({zero}) => zero));
  const high = Math.max(...windows.map(({max}) => max));
  const near = whole || !windows.length ? bars : bars.filter(({from}) => from > low - FAR && from < high + FAR);
  const ends = [low, high, ...near.flatMap(({from}) => [from, from + HALF])].filter(Number.isFinite);
  return ends.length ? [Math.floor(Math.min(...ends)) - BESIDE, Math.ceil(Math.max(...ends)) + BESIDE] : [-BESIDE, BESIDE];
}

export function optionOf({own, others, inUse, tried, linear, range}) {
  const [low, high] = range;
  const seen = ({from}) => from >= low && from < high;
  const ink = inks();
  // Begin the axis below the share of a single value, so that the bar of a single value is visible.
  const floor = linear ? 0 : 10 ** (Math.ceil(Math.log10(100 / Math.max(own.n, others?.n ?? 0, 1))) - 1);
  return {
    grid: PLOT,
    tooltip: tooltip({trigger: 'item'}),
    xAxis: axis({
      type: 'value', min: low, max: high, minInterval: 1, name: 'magnitude of a value', nameLocation: 'middle', nameGap: 28,
      axisLabel: {formatter: powerOfTwo, showMinLabel: false, showMaxLabel: false}, splitLine: {show: false},
    }),
    yAxis: axis({
      type: linear ? 'value' : 'log', min: floor, max: linear ? undefined : 100, name: 'share of values (%)',
      nameLocation: 'middle', nameGap: 52, axisLabel: {formatter: tick},
    }),
    series: [
      ...(tried.scale === null ? [] : [zones(tried)]),
      bars(own.bars.filter((bar) => bar.count && seen(bar)), floor),
      ...(others ? [outline(others.bars.filter(seen), floor)] : []),
      ...(inUse.scale === null || inUse === tried ? [] : [bracket(inUse, 'in use', IN_USE, ink.soft, ink)]),
      ...(tried.scale === null ? [] : [bracket(tried, inUse === tried ? 'in use' : 'tried', TRIED, COLORS.run, ink, true)]),
    ],
  };
}

function bars(all, floor) {
  return {
    type: 'custom', z: 3, data: all.map(({from, share}) => [from, share]), encode: {x: 0, y: 1},
    itemStyle: {color: COLORS.run},
    renderItem: (params, api) => {
      const [x, y] = api.coord([api.value(0), api.value(1)]);
      const [right, bottom] = api.coord([api.value(0) + HALF, floor]);
      return {type: 'rect', shape: {x: x + 0.5, y, width: right - x - 1, height: bottom - y}, style: {fill: COLORS.run, opacity: 0.85}};
    },
    tooltip: {
      formatter: ({dataIndex}) => {
        const {from, count: many, share} = all[dataIndex];
        return tip(`${powerOfTwo(from)} to ${powerOfTwo(from + HALF)}`, `${count(many)} values, ${number(share)}%`);
      },
    },
  };
}

function outline(all, floor) {
  const points = [...all.map(({from, share}) => [from, Math.max(share, floor)]), ...all.slice(-1).map(({from}) => [from + HALF, floor])];
  const start = all.slice(0, 1).map(({from}) => [from, floor]);
  return {
    type: 'line', step: 'end', z: 4, silent: true, symbol: 'none', data: [...start, ...points],
    lineStyle: {color: COLORS.baseline, type: 'dashed', width: 1.5},
  };
}

/** Zones of a window: values outside are hatched, with their share as a number, and subnormal values are shaded. */
function zones(cut) {
  const {zero, normal, max} = log2WindowOf(cut);
  const ink = inks();
  const {n, underflows, overflows, underflow_pct: lost, overflow_pct: clipped} = cut.metrics;
  const of = (many, pct) => `${precise(pct)}%, ${count(many)} of ${count(n)} values`;
  return {
    type: 'custom', z: 1, data: [[0]], ...NOT_DRAWN,
    renderItem: ({coordSys}, api) => {
      const {x, y, width, height} = coordSys;
      const at = (value) => Math.max(x, Math.min(x + width, api.coord([value, 1])[0]));
      const zone = (from, to, fill, opacity) => ({type: 'rect', shape: {x: from, y, width: to - from, height}, style: {fill, opacity}});
      const edge = (place) => ({type: 'line', shape: {x1: place, y1: y + LABELS, x2: place, y2: y + height}, style: {stroke: ink.text, lineWidth: 1}});
      const text = (said, place, align) => ({
        type: 'text', z2: 10,
        style: {text: said, x: place, y: y + 6, align, fill: ink.text, font: '600 12px Roboto, system-ui, sans-serif', backgroundColor: ink.ground, padding: [2, 5], borderRadius: 3},
      });
      return {
        type: 'group',
        children: [
          zone(x, at(zero), hatch(COLORS.reference, 1), 0.6),
          zone(at(zero), at(normal), ink.empty, 0.9),
          zone(at(max), x + width, hatch(COLORS.mark, -1), 0.8),
          edge(at(zero)), edge(at(max)),
          text(`become zero: ${of(underflows, lost)}`, x + 6, 'left'),
          text(`clipped: ${of(overflows, clipped)}`, x + width - 6, 'right'),
        ],
      };
    },
  };
}

/** Return a pattern of rising or falling lines, so that zones differ without color too. */
function hatch(color, slope) {
  const size = 8;
  const image = Object.assign(document.createElement('canvas'), {width: size, height: size});
  const pen = image.getContext('2d');
  pen.strokeStyle = color;
  for (const shift of [-size, 0, size]) {
    pen.moveTo(shift, slope > 0 ? size : 0);
    pen.lineTo(shift + size, slope > 0 ? 0 : size);
  }
  pen.stroke();
  return {image, repeat: 'repeat'};
}

/** A window above the plot: thin for subnormal values, thick for normal values. It has a grip if the user can move it. */
function bracket(cut, label, above, color, ink, isMoved = false) {
  const {zero, normal, max} = log2WindowOf(cut);
  const said = `${label}: ${cut.name.toUpperCase()}, scale ${precise(cut.scale)}`;
  return {
    type: 'custom', z: 5, data: [[0]], ...NOT_DRAWN,
    renderItem: ({coordSys}, api) => {
      const {x, y, width} = coordSys;
      const at = (value) => Math.max(x, Math.min(x + width, api.coord([value, 1])[0]));
      const bar = (from, to, thick) => ({type: 'rect', shape: {x: at(from), y: y - above - thick / 2, width: at(to) - at(from), height: thick}, style: {fill: color}});
      const left = at(zero) < x + width / 2;
      return {
        type: 'group',
        children: [
          bar(zero, normal, 2), bar(normal, max, 8),
          ...(isMoved ? grip((at(normal) + at(max)) / 2, y - above, color, ink) : []),
          {type: 'text', style: {text: said, x: left ? at(zero) : at(max), align: left ? 'left' : 'right', y: y - above - 18, fill: ink.text, font: '12px Roboto, system-ui, sans-serif'}},
        ],
      };
    },
  };
}

/** The grip of a window that the user can move: a handle with ridges, and arrows on both sides. */
function grip(x, y, color, ink) {
  const {width, height} = GRIP;
  const ridge = (by) => ({type: 'line', z2: 12, shape: {x1: x + by, y1: y - 4, x2: x + by, y2: y + 4}, style: {stroke: ink.ground, lineWidth: 1.5}});
  const arrow = (side) => {
    const tip = x + side * (width / 2 + 9);
    return {type: 'polygon', z2: 12, shape: {points: [[tip, y], [tip - side * 6, y - 6], [tip - side * 6, y + 6]]}, style: {fill: color, stroke: ink.ground, lineWidth: 1}};
  };
  return [
    {type: 'rect', z2: 11, shape: {x: x - width / 2, y: y - height / 2, width, height, r: 4}, style: {fill: color, stroke: ink.ground, lineWidth: 1}},
    ...[-5, 0, 5].map(ridge), arrow(-1), arrow(1),
  ];
}
