// A chart of ECharts that follows the theme and the size of its box. Its picture and its numbers can be saved.
import {CustomChart, LineChart, ScatterChart} from 'echarts/charts';
import {AriaComponent, AxisPointerComponent, DataZoomComponent, GridComponent, MarkLineComponent, TitleComponent, TooltipComponent} from 'echarts/components';
import * as echarts from 'echarts/core';
import {CanvasRenderer} from 'echarts/renderers';
import {useEffect, useLayoutEffect, useRef} from 'preact/hooks';
import {saveCsv, savePng} from '../download.js';
import {dark, inks} from '../theme.js';

echarts.use([
  CustomChart, LineChart, ScatterChart, CanvasRenderer,
  AriaComponent, AxisPointerComponent, DataZoomComponent, GridComponent, MarkLineComponent, TitleComponent, TooltipComponent,
]);

/**
 * @param {string} name of the saved files
 * @param {string} label a sentence about the chart, for screen readers
 * @param {object} option ECharts' option. Put text from records into data, never into formatters that return HTML.
 * @param {() => Array<Array>} rows function that returns the numbers as rows, headings first
 * @param {Object<string, function>} on handlers by event of ECharts
 * @param {function} ready called with ECharts' instance when it has been made
 * @param {function} resized called after the size of the chart has changed
 * @param {string|number} mark name of what is drawn; when it has been drawn, the box's data-drawn has this value
 */
export function Chart({name, label, option, rows, on = {}, height = 320, ready, resized, mark = ''}) {
  const box = useRef();
  const chart = useRef();
  const marked = useRef(mark);
  marked.current = mark;
  const after = useRef(resized);
  after.current = resized;
  const isDark = dark.value;

  // Use a layout effect, because a printer does not wait for effects.
  useLayoutEffect(() => {
    const element = box.current;
    const made = echarts.init(element, null, {renderer: 'canvas'});
    chart.current = made;
    made.on('rendered', () => (element.dataset.drawn = marked.current));
    ready?.(made);
    const fit = () => {
      made.resize();
      after.current?.();
      made.getZr().flush(); // the printer waits for no frame
    };
    // The observer also reports the first size, for which the chart is already drawn.
    const observer = new ResizeObserver(() => isFitting(made, element) || fit());
    observer.observe(element);
    window.addEventListener('beforeprint', fit);
    return () => {
      observer.disconnect();
      window.removeEventListener('beforeprint', fit);
      made.dispose();
    };
  }, []);

  useLayoutEffect(() => {
    const ink = inks();
    chart.current.setOption(
      {
        animation: false,
        backgroundColor: 'transparent',
        textStyle: {color: ink.text, fontFamily: 'Roboto, system-ui, sans-serif'},
        aria: {enabled: true, label: {description: label}},
        ...option,
      },
      {notMerge: true},
    );
  }, [option, isDark]);

  useEffect(() => {
    for (const [event, handler] of Object.entries(on)) chart.current.on(event, handler);
    return () => {
      for (const [event, handler] of Object.entries(on)) if (!chart.current.isDisposed()) chart.current.off(event, handler);
    };
  });

  return (
    <figure class="chart">
      <div class="chart-tools">
        <button type="button" onClick={() => savePng(name, chart.current.getDataURL({pixelRatio: 2, backgroundColor: inks().ground}))}>PNG</button>
        {rows && <button type="button" onClick={() => saveCsv(name, rows())}>CSV</button>}
      </div>
      <div ref={box} class="chart-box" style={{height: `${height}px`}} role="img" aria-label={label} />
    </figure>
  );
}

const isFitting = (chart, {clientWidth, clientHeight}) => chart.getWidth() === clientWidth && chart.getHeight() === clientHeight;

/** Return the option of an axis in the colors of the theme. */
export function axis(more = {}) {
  const ink = inks();
  return {
    axisLine: {lineStyle: {color: ink.line}},
    axisTick: {lineStyle: {color: ink.line}},
    axisLabel: {color: ink.soft, ...more.axisLabel},
    nameTextStyle: {color: ink.soft},
    splitLine: {lineStyle: {color: ink.line, opacity: 0.6}},
    ...Object.fromEntries(Object.entries(more).filter(([key]) => key !== 'axisLabel')),
  };
}

/** Return the element of a tooltip with lines of text. Not a string, because ECharts treats strings as HTML. */
export function tip(...lines) {
  const box = document.createElement('div');
  for (const line of lines) box.append(Object.assign(document.createElement('div'), {textContent: line}));
  return box;
}

export function tooltip(more = {}) {
  const ink = inks();
  return {backgroundColor: ink.ground, borderColor: ink.line, textStyle: {color: ink.text, fontSize: 12}, confine: true, ...more};
}
