// All events on one axis of steps, with a row for each kind. It shows what came first and what followed.
import {useEffect, useRef, useState} from 'preact/hooks';
import {toTensor} from '../address.js';
import {Link, Sentence} from '../components/basics.jsx';
import {Table} from '../components/table.jsx';
import {TensorLink} from './link.jsx';

// The layout of the strip: a row for each kind of event, a position for each step, and labels that do not overlap.
/** In pixels: height of a row, width of a mark, distance between two labels, and largest room at the ends of the axis. */
export const ROW = 26;
const MARK = 15;
const BETWEEN = 8;
const ROOM = 160;

const ruler = document.createElement('canvas').getContext('2d');

export function widthOf(text) {
  ruler.font = '12px Roboto, system-ui, sans-serif';
  return ruler.measureText(text).width;
}

/**
 * Return the marks of each row. Events of a row at nearly the same position share a mark.
 * @param {Array<{step, kind, what, row}>} events in order
 * @param {string[]} rows
 * @param {number} width pixels of the axis
 * @returns {Array<{row, marks: Array<{x, events, label: ?{x, text, end: boolean}}>}>}
 */
export function laidOut(events, rows, width) {
  const place = scaleOf(events, width);
  return rows.map((row) => ({row, marks: labeled(together(events.filter((event) => event.row === row), place), width)}));
}

/**
 * Return a function that converts steps to pixels. At both ends, there is room for labels of the first and the last event.
 */
export function scaleOf(events, width) {
  const first = events[0].step;
  const last = events[events.length - 1].step;
  const room = Math.max(MARK, Math.min(ROOM, width / 5));
  return (step) => (last === first ? width / 2 : room + ((width - 2 * room) * (step - first)) / (last - first));
}

function together(events, place) {
  const marks = [];
  for (const event of events) {
    const x = place(event.step);
    const before = marks[marks.length - 1];
    if (before && x - before.x < MARK) before.events.push(event);
    else marks.push({x, events: [event]});
  }
  return marks;
}

/** Put each label to the right of its mark if there is room, or else to the left. Without room, there is no label. */
function labeled(marks, width) {
  let taken = 0;
  return marks.map((mark, i) => {
    const text = textOf(mark.events);
    const long = widthOf(text) + BETWEEN;
    const next = i + 1 < marks.length ? marks[i + 1].x - MARK / 2 : width;
    const right = mark.x + MARK / 2 + 2;
    const left = mark.x - MARK / 2 - 2;
    const before = taken;
    taken = mark.x + MARK / 2;
    if (right + long <= next) {
      taken = right + long;
      return {...mark, label: {x: right, text, end: false}};
    }
    return {...mark, label: left - long >= before ? {x: left, text, end: true} : null};
  });
}

const LAYERS = /^(?:.*\.)?layers\.(\d+)\.(?:.*\.)?([^.]+)$/;

/** Return a layer's number and the end of its name. */
const short = (layer) => layer.replace(LAYERS, '$1.$2');

function textOf(events) {
  const [{layer, what, step}] = events;
  const tensors = new Set(events.map((event) => event.layer && `${event.role} ${event.layer}`));
  if (tensors.size === 1 && layer) return short(layer);
  if (events.length === 1) return `${what.replace(/^the /, '')}, ${step}`;
  return tensors.has(null) ? `${events.length} events` : `${tensors.size} tensors`;
}

/** Return the steps to write below the axis, at most one for every 90 pixels. */
export function ticksOf(events, width) {
  const [first, last] = [events[0].step, events[events.length - 1].step];
  const wanted = Math.max(1, Math.floor(width / 90));
  const rough = Math.max(1, (last - first) / wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const by = Math.max(1, [1, 2, 5, 10].map((times) => times * power).find((one) => one >= rough));
  const ticks = [];
  for (let at = Math.ceil(first / by) * by; at <= last; at += by) ticks.push(at);
  return ticks.length ? ticks : [first];
}

// Marks of events, which differ in shape and color.
/** The name of each kind of event, the shape of its mark, and whether the mark is filled. */
export const KINDS = {
  lr: {label: 'learning rate', shape: 'square', filled: true},
  grad_norm: {label: 'gradient norm', shape: 'up', filled: true},
  multiplier: {label: 'gradients multiplied', shape: 'up', filled: false},
  loss: {label: 'loss departs or diverges', shape: 'down', filled: true},
  reference: {label: "reference run's loss departs", shape: 'down', filled: true},
  scale: {label: 'scale goes wrong', shape: 'diamond', filled: true},
  values: {label: 'values out of band', shape: 'circle', filled: true},
  nonfinite: {label: 'NaN or infinity', shape: 'cross', filled: true},
  warning: {label: 'early warning', shape: 'circle', filled: false},
  recipe: {label: 'other recipe', shape: 'diamond', filled: false},
  weights: {label: 'weights shrink', shape: 'square', filled: false},
  product: {label: 'wrong product', shape: 'plus', filled: true},
  replica: {label: 'copies differ', shape: 'bar', filled: true},
  optimizer: {label: 'steps skipped', shape: 'bar', filled: false},
};

const PATHS = {
  square: 'M-5-5H5V5H-5Z',
  up: 'M0-6 6 5H-6Z',
  down: 'M0 6 6-5H-6Z',
  diamond: 'M0-7 6 0 0 7-6 0Z',
  circle: 'M-5.5 0a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0-11 0Z',
  cross: 'M-6-4-4-6 0-2 4-6 6-4 2 0 6 4 4 6 0 2-4 6-6 4-2 0Z',
  plus: 'M-2-6H2V-2H6V2H2V6H-2V2H-6V-2H-2Z',
  bar: 'M-3-6H3V6H-3Z',
};

export const Shape = ({kind}) => <path d={PATHS[KINDS[kind].shape]} class={`event ${kind} ${KINDS[kind].filled ? 'filled' : 'hollow'}`} />;

/**
 * @param {{events: Array, rows: string[]}} story
 * @param {string} unit what the numbers on the axis count: steps or samples
 */
export function Strip({events, rows, unit, run}) {
  const [box, width] = useWidth();
  if (!events.length) return <p data-events="none">No events.</p>;
  return (
    <section aria-label="Events in order" class="strip">
      <h2>What happened, in order</h2>
      <div ref={box}>{width > 0 && <Picture events={events} rows={rows} unit={unit} width={width} />}</div>
      <Legend events={events} />
      <details>
        <summary>The same as a table, {events.length} in all</summary>
        <Events events={events} unit={unit} run={run} />
      </details>
    </section>
  );
}

function useWidth() {
  const box = useRef();
  const [width, keep] = useState(0);
  useEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    const measure = () => keep(element.clientWidth);
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    window.addEventListener('beforeprint', measure);
    return () => {
      observer.disconnect();
      window.removeEventListener('beforeprint', measure);
    };
  }, []);
  return [box, width];
}

function Picture({events, rows, unit, width}) {
  const margin = Math.ceil(Math.max(...rows.map(widthOf), widthOf(unit))) + 14;
  const inner = width - margin;
  const place = scaleOf(events, inner);
  const bottom = rows.length * ROW;
  return (
    <svg width={width} height={bottom + 24} role="group" aria-label={`${events.length} events by ${unit}, one row for each kind; the table below has the same events`}>
      {rows.map((row, i) => (
        <g key={row} transform={`translate(0 ${i * ROW + ROW / 2})`}>
          <line x1={margin} x2={width} class="rule" />
          <text x={margin - 12} dy="4" class="row-name">{row}</text>
        </g>
      ))}
      <g transform={`translate(${margin} 0)`}>
        {events.filter(({kind}) => kind === 'loss').map(({step}) => <line key={step} x1={place(step)} x2={place(step)} y2={bottom} class="since" />)}
        {ticksOf(events, inner).map((step) => <text key={step} x={place(step)} y={bottom + 16} class="tick">{step}</text>)}
        {laidOut(events, rows, inner).map(({row, marks}, i) => (
          <g key={row} transform={`translate(0 ${i * ROW + ROW / 2})`}>
            {marks.map((mark) => <Mark key={mark.x} {...mark} unit={unit} />)}
          </g>
        ))}
      </g>
      <text x={margin - 12} y={bottom + 16} class="row-name">{unit}</text>
    </svg>
  );
}

/** Return the state that shows an event: the tensor's timeline at the event's step, or else the loss at this step. */
const wayTo = ({layer, role, step}) => (layer && role ? toTensor({layer, role}, {view: 'timeline', step}) : {view: 'timeline', step});

function Mark({x, events, label, unit}) {
  const steps = [...new Set(events.map((event) => event.step))];
  const said = `${unit} ${steps.length > 1 ? `${steps[0]} to ${steps[steps.length - 1]}` : steps[0]}: ${events.map((event) => event.what).join('; ')}`;
  return (
    <Link to={wayTo(events[0])} label={label ? `${label.text}: ${said}` : said}>
      <title>{said}</title>
      <g transform={`translate(${x} 0)`} data-step={events[0].step} data-kinds={events.map((event) => event.kind).join(' ')}>
        <rect x="-10" y="-12" width="20" height="24" class="reach" />
        <Shape kind={events[0].kind} />
      </g>
      {label && <text x={label.x} dy="4" class={label.end ? 'label end' : 'label'}>{label.text}</text>}
    </Link>
  );
}

function Legend({events}) {
  const kinds = Object.keys(KINDS).filter((kind) => events.some((event) => event.kind === kind));
  return (
    <ul class="legend-of-events" aria-label="Legend">
      {kinds.map((kind) => <li key={kind}><svg width="16" height="16" viewBox="-8 -8 16 16" aria-hidden="true"><Shape kind={kind} /></svg> {KINDS[kind].label}</li>)}
    </ul>
  );
}

function Events({events, unit, run}) {
  const columns = [
    {label: unit, of: (row) => row.step, show: (row) => <Link to={wayTo(row)}>{row.step}</Link>},
    {label: 'row', of: (row) => row.row, text: true},
    {label: 'kind', of: (row) => KINDS[row.kind].label, text: true},
    {label: 'what', of: (row) => row.what, text: true, show: (row) => <Sentence text={row.what} />},
    {label: 'tensor', of: (row) => row.layer, text: true, show: (row) => (row.layer && row.role ? <TensorLink {...row} /> : '-')},
  ];
  return <Table name={`events of ${run}`} caption="Events in order" columns={columns} rows={events} first={50} />;
}
