// The cells of a map as one picture between axes that are laid out once: an element a cell would make thousands a step.
import {useEffect, useMemo, useRef} from 'preact/hooks';
import Image from 'zrender/lib/graphic/Image.js';
import {colorOf} from '../color/scales.js';
import {axis, Chart} from '../components/chart.jsx';
import {COLORS, dark, inks} from '../theme.js';
import {cells} from './cells.js';
import {isChosen} from './values.js';

// Names of layers take more room than numbers.
const leftOf = (named) => (named ? 190 : 64);
const [RIGHT, TOP, BOTTOM] = [12, 26, 96];
/** Columns whose names all fit beside each other. */
const ALL_NAMED = 60;
const [LEAST_ROW, MOST_ROW, LEAST_PX, MOST_PX] = [20, 56, 150, 860];
/** Part of the window that rows of a small model take. */
const SHARE = 0.42;

/** Of a map of so many rows. */
export function heightOf(rows) {
  const row = Math.min(MOST_ROW, Math.max(LEAST_ROW, (SHARE * window.innerHeight) / Math.max(1, rows)));
  return Math.min(MOST_PX, Math.max(LEAST_PX, rows * row)) + TOP + BOTTOM;
}

/**
 * @param {Array} values as of `valuesOf`
 * @param {object} scale as of `scaleOf`
 * @param {function} ready called with ECharts' instance
 */
export function Picture({values, scale, ready, ...more}) {
  const {named, rows, columns, groups} = cells.value;
  const left = leftOf(named);
  const made = useRef();
  const paint = (width, height) => painted(values, scale, columns.length, rows.length, width, height);
  const latest = useRef(paint);
  latest.current = paint;
  const option = useMemo(() => ({
    // As given, whatever labels would like: the picture has to fit.
    grid: {left, right: RIGHT, top: TOP, bottom: BOTTOM, outerBoundsMode: 'none'},
    xAxis: [
      axis({type: 'category', data: columns, axisLabel: {interval: columns.length > ALL_NAMED ? 'auto' : 0, fontSize: 10}, axisTick: {show: false}, splitLine: {show: false}}),
      groupAxis(groups, columns.length),
    ],
    yAxis: axis({type: 'category', data: rows, inverse: true, name: 'layer', nameLocation: 'start', axisLabel: {overflow: 'truncate', width: left - 10}, splitLine: {show: false}}),
    series: [],
  }), [cells.value, dark.value]);

  const repaint = () => {
    if (!made.current) return;
    const [width, height] = [made.current.chart.getWidth() - left - RIGHT, made.current.chart.getHeight() - TOP - BOTTOM];
    if (width > 0 && height > 0) made.current.picture.attr({style: {image: latest.current(width, height), x: left, y: TOP, width, height}});
  };
  const start = (chart) => {
    made.current = {chart, picture: new Image({silent: true, zlevel: -1, style: {}})};
    chart.getZr().add(made.current.picture);
    ready(chart);
    repaint();
  };
  useEffect(repaint);
  return <Chart option={option} ready={start} resized={repaint} {...more} />;
}

/** Below the roles the GEMM that they are of, once for each, with a line between two. */
function groupAxis(groups, columns) {
  const ends = [...groups.map(({from}) => from), columns];
  const names = new Map(groups.map(({label, from, count}) => [from + count / 2, label]));
  return axis({
    type: 'value', min: 0, max: columns, position: 'bottom', offset: 20, splitLine: {show: false}, axisLine: {show: false},
    axisTick: {show: true, length: 6, customValues: ends, lineStyle: {color: inks().soft}},
    axisLabel: {customValues: [...names.keys()], formatter: (at) => names.get(at) ?? '', rotate: 22, fontSize: 10, overflow: 'truncate', width: 110, hideOverlap: true},
  });
}

/** The cells as a canvas of a size in pixels of the page. */
function painted(values, scale, columns, rows, width, height) {
  const ink = inks();
  const fine = window.devicePixelRatio;
  const canvas = Object.assign(document.createElement('canvas'), {width: width * fine, height: height * fine});
  const pen = canvas.getContext('2d');
  pen.scale(fine, fine);
  const [wide, high] = [width / columns, height / rows];
  const gap = high > 8 ? 1 : 0;
  for (const {column, row, number} of values) {
    const share = scale.share(number);
    pen.fillStyle = Number.isNaN(share) ? ink.empty : colorOf(scale, share);
    pen.fillRect(column * wide, row * high, wide - gap, high - gap);
  }
  const now = values.find(isChosen);
  if (now) {
    Object.assign(pen, {strokeStyle: COLORS.mark, lineWidth: 2.5});
    pen.strokeRect(now.column * wide, now.row * high, wide - gap, high - gap);
  }
  return canvas;
}
