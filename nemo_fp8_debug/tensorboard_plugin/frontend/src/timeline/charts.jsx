// The charts over the steps: one axis of steps, one pointer and one zoom for all.
import {useEffect, useMemo, useRef, useState} from 'preact/hooks';
import {at, go} from '../address.js';
import {Chart} from '../components/chart.jsx';
import {Typed} from '../components/typed.jsx';
import {steps} from '../details.js';
import {placeOf} from '../units.js';
import {AXES, currentAxes} from './axes.js';
import {layoutOf} from './layout.js';
import {optionOf} from './option.js';
import {extent, tableOf} from './panels.js';

const asStep = (text) => {
  const value = Number.parseInt(text ?? '', 10);
  return Number.isSafeInteger(value) ? value : null;
};

/** [width, room below it in the window] of an element, in pixels. */
function useRoom(box) {
  const [room, set] = useState(null);
  useEffect(() => {
    const element = box.current;
    const look = () => {
      const {width, top} = element.getBoundingClientRect();
      const next = [Math.round(width), Math.round(window.innerHeight - top - window.scrollY)];
      set((before) => (before?.join() === next.join() ? before : next));
    };
    look();
    const observer = new ResizeObserver(look);
    observer.observe(element);
    window.addEventListener('resize', look);
    return () => {
      observer.disconnect();
      window.removeEventListener('resize', look);
    };
  }, []);
  return room;
}

export function Charts(props) {
  const box = useRef();
  const room = useRoom(box);
  return <div ref={box}>{room && <Drawn width={room[0]} room={room[1]} {...props} />}</div>;
}

function Drawn({children, panels, events, markers, names, title, isDark, width, room}) {
  const chart = useRef();
  const ends = extent(panels);
  const [first, last] = ends;
  const from = asStep(at('from')) ?? first;
  const to = asStep(at('to')) ?? last;
  const layout = useMemo(() => layoutOf(panels, width, room, markers.length), [panels, width, room, markers.length]);
  // Not when the zoom changes: ECharts has changed it already, and a new option would end the drag.
  const option = useMemo(() => optionOf({panels, layout, events, markers, names, ends, zoom: [from, to]}), [panels, layout, events, markers, isDark]);
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
      if (panel >= 0) go({step: steps.value[placeOf(steps.value, made.convertFromPixel({xAxisIndex: panel}, where[0]))]});
    });
  };
  return (
    <>
      <div class="controls">
        {children}
        <label>Steps from <Typed type="number" min={first} max={last} value={from} onChange={(event) => zoom(event.target.valueAsNumber, to)} data-zoom="from" /></label>
        <label>to <Typed type="number" min={first} max={last} value={to} onChange={(event) => zoom(from, event.target.valueAsNumber)} data-zoom="to" /></label>
        <button type="button" disabled={from <= first && to >= last} onClick={() => zoom(first, last)}>All steps</button>
        <Axes />
        {panels.some(({band}) => band) && <Band name={names.baseline} />}
      </div>
      <Chart
        key={panels.map((panel) => panel.name).join()}
        name={`timeline of ${title}`} height={layout.height} option={option} on={{datazoom: zoomed}} ready={ready} rows={() => tableOf(panels, names)}
        mark={markers.map(({kind, step}) => `${kind} ${step}`).join()}
        label={`${panels.map((panel) => panel.label).join(', ')} by step, of ${title}; ${markers.map(({label}) => label).join(', ')}. The tables below have all values.`}
      />
      <p class="soft">Click into a chart to look at that step; drag the bar below the charts to zoom.</p>
    </>
  );
}

function Axes() {
  return (
    <label title={AXES[currentAxes()].told}>
      Axes
      <select value={currentAxes()} onChange={(event) => go({axes: event.target.value || null})} data-picker="axes">
        {Object.entries(AXES).map(([name, {label}]) => <option key={name} value={name}>{label}</option>)}
      </select>
      {currentAxes() && <span class="soft">{AXES[currentAxes()].told}</span>}
    </label>
  );
}

const Band = ({name}) => (
  <span class="soft" title="what it does at these steps, give or take the least change that counts">
    <span class="swatch band" aria-hidden="true" /> band of {name}
  </span>
);
