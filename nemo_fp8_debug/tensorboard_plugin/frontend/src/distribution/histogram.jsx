// Magnitudes by half binades, under the windows of what is in use and what is tried; the window is dragged.
import {useMemo, useRef} from 'preact/hooks';
import '@preact/signals';
import {at, go} from '../address.js';
import {histogram, together} from '../cast.js';
import {Chart} from '../components/chart.jsx';
import {powerOfTwo} from '../units.js';
import {margin} from './cuts.js';
import {DragHint, wasDragged} from './hint.jsx';
import {optionOf, PLOT, rangeOf, REACH_PX} from './histogram_option.js';
import {FINEST, scaled} from './trial.jsx';

/** The height of the chart as a part of the window's, in pixels at least and at most. */
const [SHARE, LEAST, MOST] = [0.42, 280, 640];
const heightOf = () => Math.round(Math.max(LEAST, Math.min(SHARE * window.innerHeight, MOST)));

const shared = (parts) => {
  const {n} = together(parts);
  return {n, bars: histogram(parts).map(({from, count}) => ({from, count, share: (100 * count) / n}))};
};

export function Histogram({title, parts, baseline, baselineName, inUse, tried, children}) {
  const own = useMemo(() => shared(parts), [parts]);
  const others = useMemo(() => baseline && shared(baseline), [baseline]);
  const linear = at('shares') === 'linear';
  const whole = at('whole') === '1';
  const drag = useRef(null);
  const range = useRef();
  // The axis stands still while the window moves over it.
  if (!drag.current) range.current = rangeOf([...own.bars, ...(others?.bars ?? [])], [inUse, tried], whole);
  const now = useRef();
  now.current = {scale: tried.scale * 2 ** margin()};

  const option = optionOf({own, others, inUse, tried, linear, range: range.current});
  const rows = () => [
    ['log2 magnitude from', 'to', 'values', 'share (%)', ...(others ? [`share in ${baselineName} (%)`] : [])],
    ...own.bars.map(({from, count, share}) => [from, from + 0.5, count, share, ...(others ? [others.bars.find((bar) => bar.from === from)?.share ?? 0] : [])]),
  ];
  const [low, high] = range.current;
  const beyond = own.bars.reduce((sum, {from, count}) => sum + (from < low || from >= high ? count : 0), 0);
  const {underflow_pct: lost = null, overflow_pct: clipped = null} = tried.metrics ?? {};
  return (
    <>
      {tried.scale !== null && <DragHint />}
      <Chart
        name={`distribution of ${title}`} height={heightOf()} rows={rows} option={option} ready={(chart) => dragging(chart, drag, now)}
        label={`Magnitudes of ${title}; as tried, ${lost}% become zero and ${clipped}% are clipped. The slider below moves the window.`}
      />
      <div class="controls">
        <label>
          <input type="checkbox" checked={linear} onChange={(event) => go({shares: event.target.checked ? 'linear' : null})} data-try="linear" />
          linear axis of shares
        </label>
        <label title="magnitudes far below the window, too">
          <input type="checkbox" checked={whole} onChange={(event) => go({whole: event.target.checked ? 1 : null})} data-try="whole" />
          all magnitudes
        </label>
        {beyond > 0 && <span class="soft">{beyond.toLocaleString('en')} values lie beside {powerOfTwo(low)} to {powerOfTwo(high)}, which is shown; they are counted.</span>}
        {children}
      </div>
    </>
  );
}

/** Moves the scale against the pointer: a window further right is that of a smaller scale. */
function dragging(chart, drag, now) {
  const area = chart.getZr();
  const inside = ({offsetX: x, offsetY: y}) =>
    x >= PLOT.left && x <= chart.getWidth() - PLOT.right && y >= PLOT.top - REACH_PX && y <= chart.getHeight() - PLOT.bottom;
  area.on('mousedown', (event) => {
    if (inside(event)) drag.current = {x: event.offsetX, scale: now.current.scale, moved: 0};
  });
  area.on('mousemove', (event) => {
    if (!drag.current) {
      if (inside(event)) area.setCursorStyle('ew-resize');
      return;
    }
    const {x, scale, moved} = drag.current;
    const width = chart.convertToPixel({xAxisIndex: 0}, 1) - chart.convertToPixel({xAxisIndex: 0}, 0);
    const eighths = Math.round((FINEST * (event.offsetX - x)) / width);
    if (eighths === moved) return;
    drag.current.moved = eighths;
    const next = scaled(scale, -eighths / FINEST);
    if (next) go({scale: next});
  });
  const end = () => {
    const moved = drag.current?.moved;
    drag.current = null;
    if (moved) wasDragged();
    if (moved) go({}); // so that the axis makes room for where the window is now
  };
  area.on('mouseup', end);
  area.on('globalout', end);
}
