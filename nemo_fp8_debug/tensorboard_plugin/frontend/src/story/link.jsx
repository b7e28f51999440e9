// A tensor's name as a link; its card opens while the pointer or the keyboard stays on it.
import {useEffect, useId, useLayoutEffect, useRef, useState} from 'preact/hooks';
import {toTensor} from '../address.js';
import {Breakable} from '../components/breakable.jsx';
import {Link} from '../components/link.jsx';
import {titleOf} from '../units.js';
import {Card} from './card.jsx';

const [OPENS_MS, CLOSES_MS] = [400, 250];

/** A tensor's name, which opens a view of it. @param {?number} step null: the step that is looked at stays */
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

/** Above or below an element, whatever scrolls around it, and never outside of the window. */
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
