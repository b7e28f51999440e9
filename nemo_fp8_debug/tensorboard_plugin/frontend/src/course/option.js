// The axes of Course: the scalars of the run above, a small multiple for each role below, one axis of steps for all.
import {axis, tip, tooltip} from '../components/chart.jsx';
import {drawnAs} from '../runs/beside.js';
import {COLORS, inks} from '../theme.js';
import {number, tick} from '../units.js';

export const [LEFT, RIGHT] = [150, 20];
const [TOP, GAP, BOTTOM, LEAST] = [40, 30, 44, 96];
/** Between lines, whose titles stand beside them; and how wide these may be. */
const [APART, TITLE] = [12, 96];
/** The height of lines, as a part of the window's, in pixels at least and at most. */
const [LINES, LOWEST, HIGHEST] = [0.04, 28, 90];
/** Pixels that a name takes. */
const NAME = 10;
/** Part of the window that the small multiples take. */
const SHARE = 0.5;

/** {lines, maps, height}: {top, height} of each panel, in pixels. */
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
 * @param {Array} lines as of `linesOf`
 * @param {Array<{step, label, kind}>} marks where something diverges
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

/** A scalar and how its axis is drawn, in as few words as there is room for. */
const brief = ({label, log, left}) => [label, log && 'log', left > 0 && 'without 0'].filter(Boolean).join(', ');

/** The first of each so many names as share the room of one: ECharts takes long to leave out those of thousands of rows. */
function legible(rows, height) {
  const every = Math.ceil((NAME * rows.length) / height);
  return rows.filter((_, i) => i % every === 0);
}

/** Whole powers of ten around the values. */
function decadesOf({lines}) {
  const values = lines.flatMap((line) => line.values.filter((value) => value > 0));
  return {min: 10 ** Math.floor(Math.log10(Math.min(...values))), max: 10 ** Math.ceil(Math.log10(Math.max(...values)))};
}

/** Writes the ends of an axis alone: the decades between them would overlap. */
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
