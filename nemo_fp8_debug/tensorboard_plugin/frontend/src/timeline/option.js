// What ECharts draws over the steps.
import {axis, tip, tooltip} from '../components/chart.jsx';
import {COLORS, inks, STROKES} from '../theme.js';
import {number, withUnit} from '../units.js';
import {KINDS} from './panels.js';

const PLOT = 88;
const GAP = 36;
const TOP = 34;
const BOTTOM = 78;
const FEW = 80;

const tops = (panels) => panels.map((_, i) => TOP + i * (PLOT + GAP));

export const heightOf = (panels) => TOP + panels.length * (PLOT + GAP) + BOTTOM - GAP;

const named = ({label, unit, log}) => `${label}${unit ? ` (${unit})` : ''}${log ? ', logarithmic' : ''}`;

export function optionOf({panels, events, names, step, ends: [first, last], zoom}) {
  const ink = inks();
  const all = panels.map((_, i) => i);
  const bottom = panels.length - 1;
  const lines = panels.flatMap((panel, i) => linesOf(panel, i, step, step > (first + last) / 2 ? 'right' : 'left', ink));
  return {
    title: panels.map((panel, i) => ({text: named(panel), left: 8, top: tops(panels)[i] - 24, textStyle: {fontSize: 12, fontWeight: 600, color: ink.text}})),
    grid: tops(panels).map((top) => ({left: 70, right: 24, top, height: PLOT})),
    xAxis: all.map((i) => axis({
      type: 'value', gridIndex: i, min: first, max: Math.max(last, first + 1), minInterval: 1, splitLine: {show: false},
      axisLabel: {show: i === bottom}, name: i === bottom ? 'step' : '', nameLocation: 'middle', nameGap: 24,
      axisPointer: {label: {show: i === bottom, formatter: ({value}) => `step ${Math.round(value)}`}},
    })),
    yAxis: panels.map(({log}, i) => axis({type: log ? 'log' : 'value', gridIndex: i, scale: true, splitNumber: 3, axisLabel: {formatter: number, hideOverlap: true}})),
    axisPointer: {link: [{xAxisIndex: 'all'}], lineStyle: {color: ink.soft}},
    dataZoom: [
      {type: 'inside', xAxisIndex: all, startValue: zoom[0], endValue: zoom[1], filterMode: 'none', zoomOnMouseWheel: 'ctrl'},
      {type: 'slider', xAxisIndex: all, startValue: zoom[0], endValue: zoom[1], filterMode: 'none', left: 70, right: 24, bottom: 6, height: 22, borderColor: ink.line, showDetail: false, brushSelect: false, handleSize: '150%'},
    ],
    tooltip: tooltip({trigger: 'axis', formatter: (found) => told([found].flat(), panels, events, names)}),
    series: [...lines, ...marksOf(events, bottom, ink)],
  };
}

function linesOf({lines, name}, panel, step, align, ink) {
  return lines.map(({part, step: steps, values}, i) => ({
    type: 'line', id: `${name} ${part}`, xAxisIndex: panel, yAxisIndex: panel, data: steps.map((at, j) => [at, values[j]]),
    showSymbol: steps.length <= FEW, symbolSize: 4, color: COLORS[part], lineStyle: {color: COLORS[part], type: STROKES[part], width: 1.6},
    emphasis: {disabled: true}, z: part === 'run' ? 3 : 2,
    markLine: i === 0 && step !== null ? {
      silent: true, symbol: 'none', animation: false, data: [{xAxis: step}], lineStyle: {color: ink.text, type: 'solid', width: 1, opacity: 0.7},
      label: {show: panel === 0, formatter: `step ${step}`, color: ink.text, position: 'end', distance: 3, align},
    } : undefined,
  }));
}

function marksOf(events, panel, ink) {
  return Object.entries(KINDS).map(([kind, {symbol}]) => ({
    type: 'scatter', id: kind, xAxisIndex: panel, yAxisIndex: panel, symbol, symbolSize: 10, z: 5, tooltip: {show: false},
    data: events.filter((event) => event.kind === kind && event.loss !== null).map(({part, step, loss}) => ({
      value: [step, loss], itemStyle: {color: COLORS[part], borderColor: ink.text, borderWidth: 1},
    })),
  }));
}

/** All values at the pointer, and what happened there. */
function told(found, panels, events, names) {
  const lines = found.filter(({seriesType}) => seriesType === 'line');
  const step = (lines[0] ?? found[0]).value[0];
  const values = lines.map(({seriesId, value: [at, value]}) => {
    const panel = panels.find(({name}) => seriesId.startsWith(`${name} `));
    const when = at === step ? '' : `, at step ${at}`;
    return `${panel.label}, ${names[seriesId.slice(panel.name.length + 1)]}: ${value == null ? 'no value' : withUnit(value, panel.unit)}${when}`;
  });
  const seen = events.filter((event) => found.some(({value}) => value[0] === event.step));
  return tip(`step ${step}`, ...values, ...seen.map(({kind, part, step: at, why}) => `${KINDS[kind].label} in ${names[part]}, step ${at}: ${why}`));
}
