// ECharts' option for the charts over the steps: the panels, their layout, their axes, and the tooltip.
import {at} from '../address.js';
import {axis, tooltip} from '../components/chart.jsx';
import {drawnAs, lineOf} from '../runs/beside.js';
import {COLORS, inks} from '../theme.js';
import {count, placeOf, tick, withUnit} from '../units.js';
import {KINDS} from './happened.js';
import {aboutMetric, ofTheRun} from './metrics.jsx';

// The layout of the charts: one below the other. In a wide window, the run's charts are left of the tensor's charts.
const [LEFT, RIGHT] = [70, 24];
const TITLE = 25;
const GAP = 40;
/** Height of a line of labels above the first chart of a column, in pixels. */
export const LABEL = 15;
const BOTTOM = 76;
const [LEAST, MOST] = [110, 320];
const WIDE = 1700;

/**
 * @param {Array} panels all panels, those of the run first
 * @param {number} width width of all charts
 * @param {number} room height of the window for the charts
 * @param {number} labels number of lines of labels above the first chart
 * @returns {{height: number, boxes: Array<{left, width, top, height, isFirst, isLast}>}} a box for each panel
 */
export function layoutOf(panels, width, room, labels) {
  const columns = columnsOf(panels, width);
  const top = TITLE + labels * LABEL + 4;
  const most = Math.max(...columns.map((column) => column.length), 1);
  const each = Math.min(MOST, Math.max(LEAST, (room - top - BOTTOM - (most - 1) * GAP) / most));
  const tall = most * each + (most - 1) * GAP;
  const wide = width / columns.length;
  const boxes = columns.flatMap((column, c) => {
    const height = (tall - (column.length - 1) * GAP) / column.length;
    return column.map((_, i) => ({
      left: c * wide + LEFT, width: wide - LEFT - RIGHT, top: top + i * (height + GAP), height, isFirst: i === 0, isLast: i === column.length - 1,
    }));
  });
  return {height: Math.round(top + tall + BOTTOM), boxes};
}

function columnsOf(panels, width) {
  const groups = [panels.filter(({ofRun}) => ofRun), panels.filter(({ofRun}) => !ofRun)].filter((group) => group.length);
  return width >= WIDE && groups.length > 1 ? groups : [panels];
}

// Axes of values: linear, logarithmic, or robust, which means without outliers that would squash all other values.
/** The choices of axes by their name in the address. Without a name, the axis is automatic. */
export const AXES = {
  '': {label: 'automatic', told: 'logarithmic if values span a decade'},
  linear: {label: 'linear', told: 'from the least to the largest value'},
  log: {label: 'logarithmic', told: 'values of 0 and below are left out'},
  robust: {label: 'robust', told: '1st to 99th percentile of the values, without the first tenth of the steps (warm-up)'},
};

export const currentAxes = () => (at('axes') in AXES ? at('axes') : '');

const [LOWEST, HIGHEST] = [0.01, 0.99];
/** Share of the steps at the start that counts as warm-up. */
const WARM_UP = 0.1;
/** Room of an axis beyond its values, as a share of their range. */
const ROOM = 0.05;
const DECADE = 10;

const isNumber = (value) => value !== null && Number.isFinite(value);

/**
 * Return how an axis shows the values of lines.
 * @param {string} kind key of AXES
 * @param {boolean} mayBeLog whether an automatic or robust axis may be logarithmic
 * @param {Array<{step: number[], values: Array<?number>}>} lines
 * @returns {{log: boolean, limits: ?[number, number], left: number}} `limits`: null for the range of the values. `left`:
 *   number of values outside the limits, or without a logarithm
 */
export function axisOf(kind, mayBeLog, lines) {
  const values = lines.flatMap((line) => line.values.filter(isNumber));
  const log = kind === 'log' ? values.some((value) => value > 0) : kind !== 'linear' && mayBeLog && spansDecade(values);
  const limits = kind === 'robust' ? robust(lines, log) : null;
  const left = values.filter((value) => (log && value <= 0) || (limits && (value < limits[0] || value > limits[1]))).length;
  return {log, limits, left};
}

/** Return a title with the metric and the kind of its axis. */
export const axisTold = ({label, unit, log, limits, left}) =>
  [`${label}${unit && unit !== 'log2' ? ` (${unit})` : ''}`, log && 'logarithmic', limits && 'robust', left > 0 && `${count(left)} value${left === 1 ? '' : 's'} beyond the axis`].filter(Boolean).join(', ');

function spansDecade(values) {
  const positive = values.filter((value) => value > 0);
  const low = positive.reduce((least, value) => Math.min(least, value), Infinity);
  return positive.length > 0 && values.every((value) => value >= 0) && positive.some((value) => value >= DECADE * low);
}

function robust(lines, log) {
  const settled = lines.flatMap(({step, values}) => {
    const from = step[0] + WARM_UP * (step[step.length - 1] - step[0]);
    return values.filter((value, i) => isNumber(value) && step[i] >= from && (!log || value > 0));
  });
  if (!settled.length) return null;
  settled.sort((a, b) => a - b);
  const of = (share) => settled[Math.round(share * (settled.length - 1))];
  const [low, high] = [of(LOWEST), of(HIGHEST)];
  if (log) return low < high ? [low / (high / low) ** ROOM, high * (high / low) ** ROOM] : [low / 2, high * 2];
  const room = (high - low || Math.abs(high) || 1) * ROOM;
  return [low - room, high + room];
}

// What the charts over the steps show.
/**
 * @param {string[]} metrics in the order of the charts
 * @param {object} samples answers of `timeline`, by key of `shownRuns`
 * @param {object} losses answers of `loss`, by key of `shownRuns`
 * @param {?object} band answer of `band`
 * @param {string} axes key of AXES
 * @returns {Array<{name, label, unit, ofRun, log, limits, left, band, lines: Array<{part, step: number[], values: Array<?number>}>}>}
 *   panels; those of the run, such as the loss, come before those of the tensor
 */
export function panelsOf(metrics, samples, losses, band, axes) {
  return metrics
    .map((name) => {
      const {label, unit, scale, optional} = aboutMetric(name);
      const ofRun = ofTheRun(name);
      const lines = Object.entries(ofRun ? losses : samples)
        .map(([part, data]) => ({part, ...(ofRun ? recorded(data, name) : {step: data?.step, values: data?.metrics?.[name]})}))
        .filter(({values}) => values?.some((value) => value !== null));
      return {name, label, unit, ofRun, optional, lines, band: band?.metrics[name] ?? null, ...axisOf(axes, ofRun || scale === 'log', lines)};
    })
    .filter(({lines, optional}) => lines.length || !optional);
}

/** Return the line of the recorded values. The line has a gap where a value is NaN or infinite, and nowhere else. */
export function recorded(data, name) {
  const lost = new Set(data?.not_finite[name]);
  const places = (data?.[name] ?? []).flatMap((value, i) => (value === null && !lost.has(data.step[i]) ? [] : [i]));
  return {step: places.map((i) => data.step[i]), values: places.map((i) => data[name][i])};
}

/** Return the [first, last] step of all lines. */
export function extent(panels) {
  const steps = panels.flatMap(({lines}) => lines.flatMap(({step}) => [step[0], step[step.length - 1]]));
  return steps.length ? [Math.min(...steps), Math.max(...steps)] : [0, 1];
}

/** Return, by part, the value {step, value} of each line at the step nearest to a wanted step. */
export function valuesAt({lines}, wanted) {
  return Object.fromEntries(lines.map(({part, step, values}) => {
    const place = placeOf(step, wanted);
    return [part, {step: step[place], value: values[place]}];
  }));
}

/**
 * Return {low, expected, high} of a panel's band at the step nearest to a wanted step, or null outside the baseline's steps.
 */
export function bandAt({band}, wanted) {
  if (!band?.step.length || wanted < band.step[0] || wanted > band.step[band.step.length - 1]) return null;
  const place = placeOf(band.step, wanted);
  return {low: band.low[place], expected: band.expected[place], high: band.high[place]};
}

/** Return rows of a table with steps and metrics: headings, then the rows of each run. */
export function tableOf(panels, names) {
  const parts = [...new Set(panels.flatMap(({lines}) => lines.map(({part}) => part)))];
  const rows = parts.flatMap((part) => {
    const columns = panels.map(({lines}) => lines.find((line) => line.part === part));
    const values = columns.map((line) => new Map(line?.step.map((step, i) => [step, line.values[i]])));
    const steps = [...new Set(columns.flatMap((line) => line?.step ?? []))].sort((a, b) => a - b);
    return steps.map((step) => [names[part], step, ...values.map((of) => of.get(step) ?? null)]);
  });
  return [['run', 'step', ...panels.map(({name}) => name)], ...rows];
}

// The tooltip: all values of each run and of the band at a step, and the events at this step.
/** Return the limits of a band in words. */
export function bandTold(band, unit) {
  if (!band) return '';
  const ends = [band.low !== null && `from ${withUnit(band.low, unit)}`, band.high !== null && `up to ${withUnit(band.high, unit)}`];
  return ends.filter(Boolean).join(' ');
}

/** Return a value in words, with its step if it comes from another step. */
export const valueTold = (found, unit, step) =>
  found === undefined ? '' : `${found.value === null ? 'not a number' : withUnit(found.value, unit)}${found.step === step ? '' : ` (step ${found.step})`}`;

/** Return rows of strings: headings, then a row for each panel. */
export function rowsAt(step, panels, names) {
  const parts = Object.keys(names).filter((part) => panels.some(({lines}) => lines.some((line) => line.part === part)));
  const banded = panels.some((panel) => bandAt(panel, step));
  return [
    [`step ${step}`, ...parts.map((part) => names[part]), ...(banded ? ['band'] : [])],
    ...panels.map((panel) => {
      const values = valuesAt(panel, step);
      return [panel.label, ...parts.map((part) => valueTold(values[part], panel.unit, step)), ...(banded ? [bandTold(bandAt(panel, step), panel.unit)] : [])];
    }),
  ];
}

const element = (tag, text, more = {}) => Object.assign(document.createElement(tag), {textContent: text, ...more});

/** Return the tooltip at a step as an element with text, because ECharts treats strings as HTML. */
export function tipAt(step, panels, events, names) {
  const box = element('div', '', {className: 'tip'});
  const table = element('table', '');
  const [headings, ...rows] = rowsAt(step, panels, names);
  for (const cells of [headings, ...rows]) {
    const row = table.insertRow();
    cells.forEach((text, i) => row.append(element(cells === headings || i === 0 ? 'th' : 'td', text)));
  }
  box.append(table);
  for (const {kind, part, step: at, why} of events.filter((event) => event.step === step)) {
    box.append(element('div', `${KINDS[kind].label} in ${names[part]}, step ${at}: ${why}`));
  }
  return box;
}

const FEW = 80;

/** @param {{panels, layout, events, markers, names, ends: [number, number], zoom: [number, number]}} shown */
export function optionOf({panels, layout: {boxes}, events, markers, names, ends: [first, last], zoom}) {
  const ink = inks();
  const all = panels.map((_, i) => i);
  return {
    title: panels.map((panel, i) => ({text: axisTold(panel), left: boxes[i].left - 62, top: boxes[i].top - 25 - (boxes[i].isFirst ? markers.length * LABEL : 0), textStyle: {fontSize: 12, fontWeight: 600, color: ink.text}})),
    grid: boxes.map(({left, width, top, height}) => ({left, width, top, height, outerBoundsMode: 'none'})),
    xAxis: boxes.map(({isLast}, i) => axis({
      type: 'value', gridIndex: i, min: first, max: Math.max(last, first + 1), minInterval: 1, splitLine: {show: false},
      axisLabel: {show: isLast, hideOverlap: true}, name: isLast ? 'step' : '', nameLocation: 'middle', nameGap: 24,
      axisPointer: {label: {show: isLast, formatter: ({value}) => `step ${Math.round(value)}`}},
    })),
    yAxis: panels.map(({unit, log, limits}, i) => axis({
      type: log ? 'log' : 'value', gridIndex: i, scale: true, splitNumber: 3, min: limits?.[0], max: limits?.[1],
      axisLabel: {formatter: (value) => (unit === 'log2' ? withUnit(value, unit) : tick(value)), hideOverlap: true, showMinLabel: limits ? false : undefined, showMaxLabel: limits ? false : undefined},
    })),
    axisPointer: {link: [{xAxisIndex: 'all'}], lineStyle: {color: ink.soft}},
    dataZoom: [
      {type: 'inside', xAxisIndex: all, startValue: zoom[0], endValue: zoom[1], filterMode: 'none', zoomOnMouseWheel: 'ctrl'},
      {type: 'slider', xAxisIndex: all, startValue: zoom[0], endValue: zoom[1], filterMode: 'none', left: 70, right: 24, bottom: 6, height: 22, borderColor: ink.line, showDetail: false, brushSelect: false, handleSize: '150%'},
    ],
    tooltip: tooltip({trigger: 'axis', formatter: (found) => tipAt(Math.round([found].flat()[0].axisValue), panels, events, names)}),
    series: [
      ...panels.flatMap((panel, i) => (panel.band ? [bandOf(panel.band, panel, i)] : [])),
      ...panels.flatMap((panel, i) => linesOf(panel, i)),
      ...panels.map((panel, i) => markersIn(markers, i, boxes[i].isFirst, (first + last) / 2, ink)),
      ...marksOf(events, panels.findIndex(({name}) => name === 'loss'), ink),
    ],
  };
}

function linesOf({lines, name, log}, panel) {
  return lines.map(({part, step: steps, values}) => ({
    type: 'line', id: `${name} ${part}`, xAxisIndex: panel, yAxisIndex: panel,
    data: steps.map((at, j) => [at, log && values[j] <= 0 ? null : values[j]]),
    showSymbol: steps.length <= FEW, symbolSize: 4, ...drawnAs(part),
  }));
}

/**
 * Return the series of a band: the range of usual values, shaded, with lines at its limits. A side without a limit is open.
 */
function bandOf({step, low, high}, {name, log}, panel) {
  const known = step.flatMap((_, i) => (low[i] === null && high[i] === null ? [] : [i]));
  return {
    type: 'custom', id: `${name} band`, xAxisIndex: panel, yAxisIndex: panel, z: 1, data: [[0]], encode: {x: -1, y: -1}, silent: true, clip: true, tooltip: {show: false},
    renderItem: ({coordSys: {y, height}}, api) => {
      const place = (i, value, edge) => (value === null || (log && value <= 0) ? [api.coord([step[i], 1])[0], edge] : api.coord([step[i], value]));
      const above = known.map((i) => place(i, high[i], y - 2));
      const below = known.map((i) => place(i, low[i], y + height + 2));
      const edge = (points) => ({type: 'polyline', shape: {points}, style: {stroke: COLORS.baseline, fill: 'none', lineWidth: 1, lineDash: [2, 3], opacity: 0.9}});
      return {
        type: 'group',
        children: [
          {type: 'polygon', shape: {points: [...above, ...below.reverse()]}, style: {fill: COLORS.baseline, opacity: 0.14}},
          edge(above), edge(below),
        ],
      };
    },
  };
}

const LINES = {
  diverges: (ink) => ({color: ink.text, type: 'dashed', width: 1.6}),
  leaves: () => ({color: COLORS.run, type: 'solid', width: 1.8}),
  chosen: (ink) => ({color: ink.soft, type: 'solid', width: 1}),
};

/**
 * Return the series of vertical lines. Their labels are above the first chart, one above the other, so that they never
 * overlap.
 */
function markersIn(markers, panel, isFirst, middle, ink) {
  return {
    type: 'line', id: `markers ${panel}`, xAxisIndex: panel, yAxisIndex: panel, data: [], silent: true, tooltip: {show: false}, z: 2,
    markLine: {
      silent: true, symbol: 'none', animation: false,
      data: markers.map(({kind, step, label}, i) => {
        const style = LINES[kind](ink);
        return {
          xAxis: step, lineStyle: style,
          label: {show: isFirst, formatter: label, color: kind === 'leaves' ? ink.text : style.color, fontWeight: kind === 'chosen' ? 400 : 600, position: 'end', distance: 3 + i * LABEL, align: step > middle ? 'right' : 'left'},
        };
      }),
    },
  };
}

function marksOf(events, panel, ink) {
  if (panel < 0) return [];
  return Object.entries(KINDS).filter(([, {symbol}]) => symbol).map(([kind, {symbol}]) => ({
    type: 'scatter', id: kind, xAxisIndex: panel, yAxisIndex: panel, symbol, symbolSize: 10, z: 5, tooltip: {show: false},
    data: events.filter((event) => event.kind === kind && event.loss !== null).map(({part, step, loss}) => ({
      value: [step, loss], itemStyle: {color: lineOf(part).color, borderColor: ink.text, borderWidth: 1},
    })),
  }));
}
