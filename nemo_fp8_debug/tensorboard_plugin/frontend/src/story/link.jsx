// Tensors by name: links that open their cards, the tensor that a view shows by default, and the tensors that matter.
import '@preact/signals';
import {useEffect, useId, useLayoutEffect, useRef, useState} from 'preact/hooks';
import {toTensor} from '../address.js';
import {Breakable, Link, Notice} from '../components/basics.jsx';
import {Table} from '../components/table.jsx';
import {titleOf} from '../units.js';
import {Card} from './card.jsx';
import {judged} from './judged.js';

const [OPENS_MS, CLOSES_MS] = [400, 250];

/** A tensor's name as a link to a view of it. @param {?number} step step to select, or null to keep the selected step */
export function TensorLink({layer, role, step, view = 'timeline', children}) {
  const id = useId();
  const [open, set] = useState(false);
  const timer = useRef();
  const box = useRef();
  const later = (next, ms) => {
    clearTimeout(timer.current);
    timer.current = setTimeout(set, ms, next);
  };
  useEffect(() => () => clearTimeout(timer.current), []);
  const keys = (event) => {
    if (event.key !== 'Escape') return;
    clearTimeout(timer.current);
    if (!open) return;
    event.stopPropagation();
    box.current.querySelector('a').focus();
    clearTimeout(timer.current);
    set(false);
  };
  const left = (event) => !box.current.contains(event.relatedTarget) && later(false, CLOSES_MS);
  return (
    <span
      ref={box} class="named" onKeyDown={keys} onMouseEnter={() => later(true, OPENS_MS)} onMouseLeave={left}
      onFocusIn={() => later(true, OPENS_MS)} onFocusOut={left} onClick={(event) => event.target.closest('a') && later(false, 0)}
    >
      <Link to={toTensor({layer, role}, {view, ...(step == null ? {} : {step})})} aria-describedby={open ? id : undefined}>{children ?? <Breakable text={titleOf({layer, role})} />}</Link>
      {open && <Over of={box}><Card id={id} layer={layer} role={role} step={step} /></Over>}
    </span>
  );
}

const ROOM = 8;

/** A box above or below an element. It follows the element when something scrolls, and stays inside the window. */
function Over({of, children}) {
  const box = useRef();
  useLayoutEffect(() => {
    const place = () => {
      const anchor = of.current.firstElementChild.getBoundingClientRect();
      const {width, height} = box.current.getBoundingClientRect();
      const below = anchor.bottom + height + ROOM <= window.innerHeight || anchor.top < height + ROOM;
      const top = below ? Math.min(anchor.bottom + 2, Math.max(ROOM, window.innerHeight - height - ROOM)) : anchor.top - height - 2;
      const left = Math.max(ROOM, Math.min(anchor.left, window.innerWidth - width - ROOM));
      Object.assign(box.current.style, {top: `${top}px`, left: `${left}px`});
    };
    place();
    const observer = new ResizeObserver(place);
    observer.observe(box.current);
    window.addEventListener('scroll', place, true);
    window.addEventListener('resize', place);
    return () => {
      observer.disconnect();
      window.removeEventListener('scroll', place, true);
      window.removeEventListener('resize', place);
    };
  }, []);
  return <div ref={box} class="over">{children}</div>;
}

// A note on which tensor a view shows while no tensor is selected.
/** @param {?{layer, role}} first value of `firstTensor` */
export function NotChosen({first}) {
  if (first) return <p class="soft" role="status">No tensor is chosen, so this is {titleOf(first)}, the first one in the verdict.</p>;
  if (judged.value.loading) return <p class="soft" role="status">No tensor is chosen. The first one in the verdict will appear here.</p>;
  return <Notice title="No tensor chosen"><p>Type a part of a layer's name above and choose a tensor, or click a cell of the map.</p></Notice>;
}

// The tensors that matter, and why each is blamed or not. Tensors on which the verdict is based come first.
const FIRST = 8;

export function Tensors({tensors, unit, run}) {
  const value = (metric) => (row) => row.values[metric].run;
  const before = (metric) => (row) => row.values[metric].baseline;
  const paired = tensors.some((row) => row.values.relative_error.baseline != null);
  const metric = (label, name) => ({label, of: value(name), ...(paired && {from: before(name)})});
  const zero = (row) => (row.zero_since == null ? undefined : `all values are zero since ${unit} ${row.zero_since}`);
  const columns = [
    {label: 'rank', of: (row) => row.harm_rank},
    {label: 'tensor', of: titleOf, text: true, show: (row) => <TensorLink {...row} step={row.since} />},
    {label: `since ${unit}`, of: (row) => row.since},
    {label: 'why', of: (row) => row.why, text: true},
    {...metric('relative error', 'relative_error'), show: zero},
    metric('underflow (%)', 'underflow_pct'),
    {label: 'rank by error', of: (row) => row.error_rank},
  ];
  return (
    <section aria-label="Tensors that matter">
      <h2>The tensors that matter</h2>
      <Table
        name={`tensors of ${run}`} caption={`Blamed first, then others that went wrong, then consequences in order; ${paired ? 'baseline → run, ' : ''}medians over the later half`}
        columns={columns} rows={tensors} first={FIRST} rowClass={(row) => (row.blamed || row.also_wrong ? 'telling' : '')}
      />
    </section>
  );
}
