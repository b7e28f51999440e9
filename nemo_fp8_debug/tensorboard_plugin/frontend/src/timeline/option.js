// What ECharts draws over the steps.
import {axis, tooltip} from '../components/chart.jsx';
import {drawnAs, lineOf} from '../runs/beside.js';
import {COLORS, inks} from '../theme.js';
import {tick, withUnit} from '../units.js';
import {axisTold} from './axes.js';
import {KINDS} from './happened.js';
import {LABEL} from './layout.js';
import {tipAt} from './tip.js';

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

/** What does not count against a tensor, shaded, and its ends; open to a side on which nothing counts. */
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

/** Vertical lines; their labels one above the other over the first chart, so that they never overlap. */
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
