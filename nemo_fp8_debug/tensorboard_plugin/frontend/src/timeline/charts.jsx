// The charts over the steps, with a common axis of steps, pointer and zoom. Also tables of their values, and a list of
// events.
import '@preact/signals';
import {useSignal} from '@preact/signals';
import {useEffect, useMemo, useRef, useState} from 'preact/hooks';
import {at, go} from '../address.js';
import {Typed} from '../components/basics.jsx';
import {Chart} from '../components/chart.jsx';
import {Table} from '../components/table.jsx';
import {steps} from '../details.js';
import {saveCsv} from '../download.js';
import {Stroke} from '../runs/also.jsx';
import {calledBy} from '../runs/beside.js';
import {placeOf} from '../units.js';
import {KINDS} from './happened.js';
import {AXES, currentAxes, extent, layoutOf, optionOf, rowsAt, tableOf} from './option.js';

// The charts as tables: all values at the selected step, and all values at all steps.
export function ValuesAt({step, panels, names}) {
  if (step === null) return null;
  const [headings, ...rows] = rowsAt(step, panels, names);
  return (
    <div class="wide">
      <table data-table="values">
        <caption>Values at step {step}, or at the nearest recorded step</caption>
        <thead><tr>{headings.map((text, i) => <th key={i} scope="col" class={i ? 'n' : ''}>{i ? text : 'metric'}</th>)}</tr></thead>
        <tbody>
          {rows.map(([label, ...cells], i) => (
            <tr key={panels[i].name} data-metric={panels[i].name}>
              <th scope="row">{label}</th>
              {cells.map((text, j) => <td key={j} class="n">{text || '-'}</td>)}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

export function AllValues({panels, names, title}) {
  const open = useSignal(false);
  return (
    <details onToggle={(event) => (open.value = event.currentTarget.open)}>
      <summary>All values as a table</summary>
      {open.value && <Rows panels={panels} names={names} title={title} />}
    </details>
  );
}

function Rows({panels, names, title}) {
  const [, ...rows] = tableOf(panels, names);
  const called = Object.fromEntries(Object.entries(names).filter(([, name]) => name).map(([key, name]) => [name, calledBy(key)]));
  const columns = [
    {label: 'run', of: (row) => row[0], show: (row) => called[row[0]], text: true},
    {label: 'step', of: (row) => row[1]},
    ...panels.map(({label, unit}, i) => ({label: unit ? `${label} (${unit})` : label, of: (row) => row[i + 2]})),
  ];
  return <Table name={`timeline of ${title}`} caption={`Values of ${title} in the charts`} columns={columns} rows={rows} first={30} />;
}

// A list of events, with links to their steps.
const MOST = 100;

export function Events({events, names}) {
  if (!events.length) return <p class="soft" data-events="none">No events: the loss does not diverge, no metric leaves the band, and there are no spikes, skipped steps or triggered samples.</p>;
  const rows = () => [['step', 'run', 'what', 'why'], ...events.map(({step, part, kind, why}) => [step, names[part], KINDS[kind].label, why])];
  return (
    <div class="wide">
      <table data-table="events">
        <caption>
          {events.length > MOST ? `The first ${MOST} of ${events.length} events` : 'What happened, in order'}{' '}
          <button type="button" onClick={() => saveCsv('events', rows())}>CSV</button>
        </caption>
        <thead><tr><th scope="col" class="n">Step</th><th scope="col">Run</th><th scope="col">What</th><th scope="col">Why</th></tr></thead>
        <tbody>
          {events.slice(0, MOST).map(({step, part, kind, why}) => (
            <tr key={`${part} ${kind} ${step} ${why}`} data-event={kind}>
              <td class="n"><button type="button" onClick={() => go({step})} aria-label={`Look at step ${step}`}>{step}</button></td>
              <td><Stroke of={part} /> {names[part]}</td>
              <td>{KINDS[kind].label}</td>
              <td class="text">{why}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

const asStep = (text) => {
  const value = Number.parseInt(text ?? '', 10);
  return Number.isSafeInteger(value) ? value : null;
};

/** Return an element's width, and the height between its top and the bottom of the window, in pixels. */
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
  // Do not update the option when the zoom changes: ECharts has zoomed already, and a new option would end the drag.
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
  <span class="soft" title="its values at these steps, plus or minus the threshold">
    <span class="swatch band" aria-hidden="true" /> band of {name}
  </span>
);
