// One map: a run's figure at a step, or what sets two runs apart.
import {useSignal} from '@preact/signals';
import {useEffect, useMemo, useRef} from 'preact/hooks';
import Image from 'zrender/lib/graphic/Image.js';
import {lerp} from 'zrender/lib/tool/color.js';
import {go, tensor} from '../address.js';
import {axis, Chart} from '../components/chart.jsx';
import {COLOURS, dark, inks} from '../theme.js';
import {number, titleOf, withUnit} from '../units.js';
import {cells} from './cells.js';

const ROW_PX = 20;
const [LEAST_PX, MOST_PX] = [150, 860];

/** The cells with their values: {column, row, tensor, value} each, of several tensors in a place the worst. */
export function valuesOf(of, worse) {
  return cells.value.cells.map(([column, row, tensors]) => {
    let [best, value] = [tensors[0], NaN];
    for (const one of tensors) {
      const mine = of(one.layer, one.role);
      if (!Number.isNaN(mine) && !(worse * mine <= worse * value)) [best, value] = [one, mine];
    }
    return {column, row, tensor: best, value, several: tensors.length};
  });
}

/** The worst of values; null where there is none. */
export const worstOf = (values, worse) =>
  values.reduce((worst, one) => (Number.isNaN(one.value) || (worst && worse * one.value <= worse * worst.value) ? worst : one), null);

const isChosen = (one) => tensor.value && one.tensor.layer === tensor.value.layer && one.tensor.role === tensor.value.role;

/**
 * @param {string} name of the panel: run, good, twin or difference
 * @param {string} title
 * @param {number} step of the sample
 * @param {Array} values as of `valuesOf`
 * @param {object} scale as of `scaleOf`
 */
export function Panel({name, title, step, values, scale, unit, worse}) {
  const worst = worstOf(values, worse);
  const {rows, columns} = cells.value;
  const height = Math.min(MOST_PX, Math.max(LEAST_PX, rows.length * ROW_PX)) + 130;
  const described = worst ? `worst is ${titleOf(worst.tensor)} with ${withUnit(worst.value, unit)}` : 'no values';
  return (
    <section class="panel" data-panel={name} data-layer={worst?.tensor.layer} data-role={worst?.tensor.role} data-value={worst?.value}>
      <h3>{title}</h3>
      <p class="soft">{worst ? <>Worst: <b>{titleOf(worst.tensor)}</b>, {withUnit(worst.value, unit)}</> : 'No values at this step.'}</p>
      <Keyed values={values} unit={unit} label={`${title}: ${described}. Arrow keys move over the map, Enter opens the timeline.`}>
        <Pointed values={values} unit={unit}>
          {(ready) => (
            <Axes
              name={`map-${name}-step-${step}`} label={`${title}: ${described}`} height={height} mark={step} ready={ready}
              rows={() => table(values, unit)} paint={(width, high) => painted(values, scale, columns.length, rows.length, width, high)}
            />
          )}
        </Pointed>
      </Keyed>
    </section>
  );
}

// As given, whatever labels would like: the picture has to fit.
const GRID = {left: 56, right: 12, top: 26, bottom: 96, outerBoundsMode: 'none'};

/** Axes that are laid out once, and between them a picture that is painted at each step. */
function Axes({paint, ready, ...more}) {
  const {rows, columns} = cells.value;
  const made = useRef();
  const latest = useRef(paint);
  latest.current = paint;
  const option = useMemo(() => ({
    grid: GRID,
    xAxis: axis({type: 'category', data: columns, axisLabel: {rotate: 40, interval: 0, fontSize: 10, overflow: 'truncate', width: 110}, splitLine: {show: false}}),
    yAxis: axis({type: 'category', data: rows, inverse: true, name: 'layer', nameLocation: 'start', splitLine: {show: false}}),
    series: [],
  }), [cells.value, dark.value]);

  const repaint = () => {
    if (!made.current) return;
    const [width, height] = [made.current.chart.getWidth() - GRID.left - GRID.right, made.current.chart.getHeight() - GRID.top - GRID.bottom];
    if (width > 0 && height > 0) made.current.picture.attr({style: {image: latest.current(width, height), x: GRID.left, y: GRID.top, width, height}});
  };
  const start = (chart) => {
    made.current = {chart, picture: new Image({silent: true, z: -1, style: {}})};
    chart.getZr().add(made.current.picture);
    ready(chart);
    repaint();
  };
  useEffect(repaint);
  return <Chart option={option} ready={start} resized={repaint} {...more} />;
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
  const colours = shadesOf(scale.colours);
  for (const {column, row, value} of values) {
    const share = (scale.to(value) - scale.low) / (scale.high - scale.low);
    pen.fillStyle = Number.isNaN(share) ? ink.empty : colours[Math.round(Math.min(1, Math.max(0, share)) * (SHADES - 1))];
    pen.fillRect(column * wide, row * high, wide - gap, high - gap);
  }
  const now = values.find(isChosen);
  if (now) {
    Object.assign(pen, {strokeStyle: COLOURS.mark, lineWidth: 2.5});
    pen.strokeRect(now.column * wide, now.row * high, wide - gap, high - gap);
  }
  return canvas;
}

const SHADES = 256;
const shades = new Map();

function shadesOf(colours) {
  const key = colours.join();
  if (!shades.has(key)) shades.set(key, Array.from({length: SHADES}, (_, i) => lerp(i / (SHADES - 1), colours)));
  return shades.get(key);
}

/** The map for the pointer: what is under it is told, a click chooses it. */
function Pointed({values, unit, children}) {
  const under = useSignal(null);
  const chart = useRef();
  const found = (event) => {
    const [column, row] = chart.current.convertFromPixel({gridIndex: 0}, [event.offsetX, event.offsetY]);
    return chart.current.containPixel({gridIndex: 0}, [event.offsetX, event.offsetY]) ? values.find((one) => one.column === column && one.row === row) : undefined;
  };
  const move = (event) => {
    const one = event.target.tagName === 'CANVAS' ? found(event) : undefined;
    under.value = one ? {one, x: event.offsetX, y: event.offsetY} : null;
  };
  const open = (event) => {
    const one = event.target.tagName === 'CANVAS' && found(event);
    if (one) go({layer: one.tensor.layer, role: one.tensor.role});
  };
  return (
    <div class="pointed" onMouseMove={move} onMouseLeave={() => (under.value = null)} onClick={open}>
      {children((made) => (chart.current = made))}
      {under.value && <Under {...under.value} unit={unit} />}
    </div>
  );
}

function Under({one, x, y, unit}) {
  return (
    <div class="under" style={{left: `${x}px`, top: `${y}px`}}>
      <b>{titleOf(one.tensor)}</b><br />{withUnit(one.value, unit)}
      {one.several > 1 && <><br />the worst of {one.several} in this place</>}
    </div>
  );
}

const table = (values, unit) => [['layer', 'role', `value (${unit || '1'})`], ...values.map(({tensor: {layer, role}, value}) => [layer, role, value])];

const MOVES = {ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0]};

/** The map for the keyboard: arrows choose a tensor, Enter opens its timeline. */
function Keyed({values, unit, label, children}) {
  const box = useRef();
  const now = values.find(isChosen);
  const keys = (event) => {
    if (event.target !== box.current) return;
    if (event.key === 'Enter' && now) go({view: 'timeline'}, true);
    const by = MOVES[event.key];
    if (!by) return;
    event.preventDefault();
    const next = now ? nearest(values, now, by) : values[0];
    if (next) go({layer: next.tensor.layer, role: next.tensor.role});
  };
  return (
    <div ref={box} class="keyed" tabIndex={0} role="group" aria-label={label} onKeyDown={keys}>
      {children}
      <span class="unseen" aria-live="polite">{now ? `${titleOf(now.tensor)}: ${number(now.value)} ${unit}` : ''}</span>
    </div>
  );
}

/** The next cell in a direction. */
function nearest(values, from, [right, down]) {
  const ahead = values.filter((one) => (right ? one.row === from.row && Math.sign(one.column - from.column) === right : one.column === from.column && Math.sign(one.row - from.row) === down));
  const far = (one) => Math.abs(one.column - from.column) + Math.abs(one.row - from.row);
  return ahead.reduce((best, one) => (!best || far(one) < far(best) ? one : best), null);
}
