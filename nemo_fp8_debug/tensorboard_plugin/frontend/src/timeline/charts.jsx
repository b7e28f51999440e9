// The charts over the steps: one axis of steps, one pointer and one zoom for all.
import {useMemo, useRef} from 'preact/hooks';
import {at, go, tensor} from '../address.js';
import {Chart} from '../components/chart.jsx';
import {steps} from '../records.js';
import {placeOf, titleOf} from '../units.js';
import {heightOf, optionOf} from './option.js';
import {extent, tableOf} from './panels.js';

const asStep = (text) => {
  const value = Number.parseInt(text ?? '', 10);
  return Number.isSafeInteger(value) ? value : null;
};

export function Charts({panels, events, names, step, isDark}) {
  const chart = useRef();
  const ends = extent(panels);
  const [first, last] = ends;
  const from = asStep(at('from')) ?? first;
  const to = asStep(at('to')) ?? last;
  // Not when the zoom changes: ECharts has changed it already, and a new option would end the drag.
  const option = useMemo(() => optionOf({panels, events, names, step, ends, zoom: [from, to]}), [panels, events, step, isDark]);
  const keep = ([low, high]) => go({from: low <= first ? null : low, to: high >= last ? null : high});
  const zoomed = () => {
    const {startValue, endValue} = chart.current.getOption().dataZoom[0];
    keep([Math.round(startValue), Math.round(endValue)]);
  };
  const zoom = (startValue, endValue) => startValue < endValue && chart.current.dispatchAction({type: 'dataZoom', startValue, endValue});
  const ready = (made) => {
    chart.current = made;
    made.getZr().on('click', (event) => {
      const where = [event.offsetX, event.offsetY];
      const panel = made.getOption().grid.findIndex((_, i) => made.containPixel({gridIndex: i}, where));
      if (panel >= 0) go({step: nearest(steps.value, made.convertFromPixel({xAxisIndex: panel}, where[0]))});
    });
  };
  const title = tensor.value ? titleOf(tensor.value) : 'the loss';
  return (
    <>
      <div class="controls">
        <label>Steps from <input type="number" min={first} max={last} value={from} onChange={(event) => zoom(event.target.valueAsNumber, to)} data-zoom="from" /></label>
        <label>to <input type="number" min={first} max={last} value={to} onChange={(event) => zoom(from, event.target.valueAsNumber)} data-zoom="to" /></label>
        <button type="button" disabled={from <= first && to >= last} onClick={() => zoom(first, last)}>All steps</button>
        <span class="soft">Click into a chart to look at that step; drag the bar below the charts to zoom.</span>
      </div>
      <Chart
        name={`timeline of ${title}`} height={heightOf(panels)} option={option} on={{datazoom: zoomed}} ready={ready} rows={() => tableOf(panels, names)}
        label={`${panels.map((panel) => panel.label).join(', ')} by step, of ${title}; the CSV has all values.`}
      />
    </>
  );
}

function nearest(all, wanted) {
  const place = placeOf(all, wanted);
  const next = all[place + 1];
  return next !== undefined && next - wanted < wanted - all[place] ? next : all[place];
}
