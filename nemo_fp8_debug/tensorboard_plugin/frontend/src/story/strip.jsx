// Every event of any kind on one axis of steps, in order, a row a kind: what came first, and what followed.
import {useEffect, useRef, useState} from 'preact/hooks';
import {toTensor} from '../address.js';
import {Link} from '../components/link.jsx';
import {TensorLink} from './link.jsx';
import {Sentence} from '../components/notice.jsx';
import {Table} from '../components/table.jsx';
import {laidOut, ROW, scaleOf, ticksOf, widthOf} from './layout.js';
import {KINDS, Shape} from './shapes.jsx';

/** @param {{events: Array, rows: string[]}} story @param {string} unit what steps count */
export function Strip({events, rows, unit, run}) {
  const [box, width] = useWidth();
  if (!events.length) return <p data-events="none">Nothing happened that the record tells of.</p>;
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
    <svg width={width} height={bottom + 24} role="group" aria-label={`${events.length} events by ${unit}, a row a kind; the table below says the same`}>
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

/** Where an event is seen: the tensor's timeline at that step, or the loss there. */
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
