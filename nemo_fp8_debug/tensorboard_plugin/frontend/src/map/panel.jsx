// One map: a run's metric at a step, or the difference of two runs. It works by pointer and by keyboard.
import Image from 'zrender/lib/graphic/Image.js';
import {useSignal} from '@preact/signals';
import {useEffect, useMemo, useRef} from 'preact/hooks';
import {go, toTensor} from '../address.js';
import {asMultiple, colorOf} from '../color/scales.js';
import {axis, Chart} from '../components/chart.jsx';
import {COLORS, dark, inks} from '../theme.js';
import {number, titleOf, withUnit} from '../units.js';
import {cells, isChosen, worstOf} from './data.js';

// The map by keyboard: arrow keys select a tensor, and Enter opens its timeline.
const MOVES = {ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0]};

export function Keyed({values, tell, label, children}) {
  const box = useRef();
  const now = values.find(isChosen);
  const keys = (event) => {
    if (event.target !== box.current) return;
    if (event.key === 'Enter' && now) go({view: 'timeline'}, true);
    const by = MOVES[event.key];
    if (!by) return;
    event.preventDefault();
    const next = now ? nearest(values, now, by) : values[0];
    if (next) go(toTensor(next.tensor));
  };
  return (
    <div ref={box} class="keyed" tabIndex={0} role="group" aria-label={label} onKeyDown={keys}>
      {children}
      <span class="unseen" aria-live="polite">{now ? `${titleOf(now.tensor)}: ${tell(now)}` : ''}</span>
    </div>
  );
}

/** Return the next cell in a direction, or null at the edge of the map. */
function nearest(values, from, [right, down]) {
  const ahead = values.filter((one) => (right ? one.row === from.row && Math.sign(one.column - from.column) === right : one.column === from.column && Math.sign(one.row - from.row) === down));
  const far = (one) => Math.abs(one.column - from.column) + Math.abs(one.row - from.row);
  return ahead.reduce((best, one) => (!best || far(one) < far(best) ? one : best), null);
}

// The map by pointer: a box describes the cell under the pointer, and a click selects its tensor.
/** @param {function} tell function that describes a cell's value in words */
export function Pointed({values, tell, children}) {
  const under = useSignal(null);
  const chart = useRef();
  const placeOf = (event) => {
    const where = [event.offsetX, event.offsetY];
    if (event.target.tagName !== 'CANVAS' || !chart.current.containPixel({gridIndex: 0}, where)) return null;
    const [column, row] = chart.current.convertFromPixel({gridIndex: 0}, where);
    return {column, row, x: where[0], y: where[1], width: chart.current.getWidth()};
  };
  // Keep the pointer's cell, not its value, because the value changes with the step and the metric.
  const found = (place) => place && values.find((one) => one.column === place.column && one.row === place.row);
  const open = (event) => {
    const one = found(placeOf(event));
    if (one) go(toTensor(one.tensor));
  };
  const now = found(under.value);
  return (
    <div class="pointed" onMouseMove={(event) => (under.value = placeOf(event))} onMouseLeave={() => (under.value = null)} onClick={open}>
      {children((made) => (chart.current = made))}
      {now && <Under {...under.value}><b>{titleOf(now.tensor)}</b><br />{tell(now)}{now.tensors.length > 1 && <><br />the worst of {now.tensors.length} at this place</>}</Under>}
    </div>
  );
}

/** A box next to the pointer, on the side with more room. */
export function Under({x, y, width, children}) {
  const right = x > width / 2;
  return <div class="under" style={{top: `${y + 14}px`, ...(right ? {right: `${width - x + 10}px`} : {left: `${x + 10}px`}), maxWidth: `min(24rem, ${(right ? x : width - x) - 12}px)`}}>{children}</div>;
}

// The cells of a map as one picture between axes that are laid out once. One element for each cell would mean thousands at
// each step. Names of layers take more room than numbers.
const leftOf = (named) => (named ? 190 : 64);
const [RIGHT, TOP, BOTTOM] = [12, 26, 96];
/** Largest number of columns for which all names fit next to each other. */
const ALL_NAMED = 60;
const [LEAST_ROW, MOST_ROW, LEAST_PX, MOST_PX] = [20, 56, 150, 860];
/** Share of the window's height for the rows of a small model. */
const SHARE = 0.42;

/** Return the height of a map with this many rows. */
export function heightOf(rows) {
  const row = Math.min(MOST_ROW, Math.max(LEAST_ROW, (SHARE * window.innerHeight) / Math.max(1, rows)));
  return Math.min(MOST_PX, Math.max(LEAST_PX, rows * row)) + TOP + BOTTOM;
}

/**
 * @param {Array} values as of `valuesOf`
 * @param {object} scale as of `scaleOf`
 * @param {function} ready called with ECharts' instance when it has been made
 */
export function Picture({values, scale, ready, ...more}) {
  const {named, rows, columns, groups} = cells.value;
  const left = leftOf(named);
  const made = useRef();
  const paint = (width, height) => painted(values, scale, columns.length, rows.length, width, height);
  const latest = useRef(paint);
  latest.current = paint;
  const option = useMemo(() => ({
    // Keep these margins regardless of labels, because the picture must fit the axes.
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

/** Return an axis below the roles with the name of each GEMM, and a line between GEMMs. */
function groupAxis(groups, columns) {
  const ends = [...groups.map(({from}) => from), columns];
  const names = new Map(groups.map(({label, from, count}) => [from + count / 2, label]));
  return axis({
    type: 'value', min: 0, max: columns, position: 'bottom', offset: 20, splitLine: {show: false}, axisLine: {show: false},
    axisTick: {show: true, length: 6, customValues: ends, lineStyle: {color: inks().soft}},
    axisLabel: {customValues: [...names.keys()], formatter: (at) => names.get(at) ?? '', rotate: 22, fontSize: 10, overflow: 'truncate', width: 110, hideOverlap: true},
  });
}

/** Draw the cells on a canvas. The size is in pixels of the page. */
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

/**
 * @param {string} name of the panel: run, baseline, reference or difference
 * @param {string} title
 * @param {number} step of the sample
 * @param {Array} values as of `valuesOf`
 * @param {object} scale as of `scaleOf`
 * @param {function} badness function that rates the numbers that colors show: worse numbers get larger ratings
 * @param {boolean} multiples whether the colors show multiples of the threshold
 * @param {function} show function that returns a value in words, without its unit
 */
export function Panel({name, title, step, values, scale, unit, badness, multiples = false, show = number}) {
  const worst = worstOf(values, badness);
  const {rows} = cells.value;
  const tell = ({value, number: times}) => `${withUnit(value, unit, show)}${multiples ? `, ${asMultiple(times)}` : ''}`;
  const most = multiples ? 'Farthest' : 'Worst';
  const described = worst ? `${most.toLowerCase()} is ${titleOf(worst.tensor)} with ${tell(worst)}` : 'no values';
  return (
    <section class="panel" data-panel={name} data-layer={worst?.tensor.layer} data-role={worst?.tensor.role} data-value={worst?.value}>
      <h3>{title}</h3>
      <p class="soft">{worst ? <>{most}: <b>{titleOf(worst.tensor)}</b>, {tell(worst)}</> : 'No values at this step.'}</p>
      <Keyed values={values} tell={tell} label={`${title}: ${described}. Arrow keys move over the map, Enter opens the timeline.`}>
        <Pointed values={values} tell={tell}>
          {(ready) => (
            <Picture
              name={`map-${name}-step-${step}`} label={`${title}: ${described}`} height={heightOf(rows.length)} mark={step} ready={ready}
              values={values} scale={scale} rows={() => table(values, unit, multiples)}
            />
          )}
        </Pointed>
      </Keyed>
    </section>
  );
}

// The table of a map. A cell with several tensors has the worst.
const table = (values, unit, multiples) => [
  ['layer', 'role', `value (${unit || '1'})`, ...(multiples ? ['x threshold'] : [])],
  ...values.map(({tensor: {layer, role}, value, number: times}) => [layer, role, value, ...(multiples ? [times] : [])]),
];
