// The histogram of a tensor by half binades, the windows of the cast in use and of the cast to try, and controls to try
// another cast.
import '@preact/signals';
import {signal} from '@preact/signals';
import {useMemo, useRef} from 'preact/hooks';
import {at, go} from '../address.js';
import {amaxOf, asScale, currentScale, histogram, metricsOf, together} from '../cast.js';
import {Chart} from '../components/chart.jsx';
import {known} from '../records.js';
import {count, number, powerOfTwo, precise} from '../units.js';
import {optionOf, PLOT, rangeOf, REACH_PX} from './histogram_option.js';

// Two casts of a tensor: the cast in use, and the cast to try.
/** Return the formats to try. Formats of 16 bits are left out, because they need no scale. */
export const formatsToTry = () => Object.entries(known.value.formats).filter(([, format]) => format.bits <= 8);

export const MOST_MARGIN = 32;

/** Return the margin m. Scales are divided by 2^m. */
export function margin() {
  const value = Number(at('margin') ?? 0);
  return Number.isInteger(value) && Math.abs(value) <= MOST_MARGIN ? value : 0;
}

const cut = (parts, scales, name) => {
  const format = known.value.formats[name];
  const castable = format && scales.every((scale) => scale !== null);
  return {name, format, scale: castable ? Math.min(...scales) : null, scales, metrics: castable ? metricsOf(parts, scales, format) : null};
};

/**
 * Return two casts of a tensor's parts: the cast in use, and the cast to try (from the address, or else the same).
 * @returns {{inUse, tried, base: number}} each cast {name, format, scale, scales, metrics}. `scale` is the smallest of
 *   `scales`, or null if a scale is unknown. `base` is the scale that the slider starts from.
 */
export function cuts(rows, parts) {
  const inUse = cut(parts, rows.map(({scale}) => asScale(scale)), rows[0].format);
  const names = formatsToTry().map(([name]) => name);
  const name = [at('format'), inUse.name].find((one) => names.includes(one)) ?? names[0];
  const base = inUse.scale ?? currentScale(amaxOf(parts), known.value.formats[name]);
  const chosen = asScale(Number(at('scale')));
  const scales = parts.map((_, i) => asScale((chosen ?? inUse.scales[i] ?? base) / 2 ** margin()) ?? base);
  const same = inUse.metrics && name === inUse.name && scales.every((scale, i) => scale === inUse.scales[i]);
  return {inUse, tried: same ? inUse : cut(parts, scales, name), base};
}

// A hint that the window can be dragged. It is shown until the user has dragged the window or dismissed the hint.
const KEY = 'fp8.dragged';

// A page from a file, or in a browser that forbids storage, shows the hint each time.
function kept() {
  try {
    return localStorage.getItem(KEY) === '1';
  } catch {
    return false;
  }
}

const isHintKnown = signal(kept());

/** Do not show the hint again. */
export function wasDragged() {
  isHintKnown.value = true;
  try {
    localStorage.setItem(KEY, '1');
  } catch {
    // Without storage, the hint returns when the page is opened again.
  }
}

export function DragHint() {
  if (isHintKnown.value) return null;
  return (
    <p class="hint" data-words="drag">
      <span aria-hidden="true">⇔ </span>Drag the window by its handle, or move the Scale slider below, to try another scale.{' '}
      <button type="button" class="small" onClick={wasDragged}>Got it</button>
    </p>
  );
}

// Controls for the scale, the margin and the format to try.
const REACH = 24;
/** Steps of the slider for each factor of two in the scale. */
export const FINEST = 8;

export const scaled = (scale, log2) => asScale(scale * 2 ** log2);

export function Trial({base, tried, amax}) {
  const scale = asScale(Number(at('scale'))) ?? base;
  const offset = Math.log2(scale / base);
  const said = `scale ${number(scale)}, ${offset < 0 ? '' : '+'}${number(offset)} powers of two from the scale in use`;
  const setMargin = (event) => Number.isInteger(event.target.valueAsNumber) && go({margin: event.target.valueAsNumber || null});
  return (
    <div class="controls" role="group" aria-label="Try another scale or format">
      <label class="wide-label">
        Scale
        <input
          type="range" min={-REACH} max={REACH} step={1 / FINEST} value={offset} aria-valuetext={said} data-try="scale"
          onInput={(event) => go({scale: scaled(base, event.target.valueAsNumber)})}
        />
        <output data-try="effective" data-value={tried.scale}>
          {precise(tried.scale)} <span class="soft">(in use × {powerOfTwo(Math.log2(tried.scale / base))})</span>
        </output>
      </label>
      <label title="divides the scale by 2 to this power">
        Margin
        <input type="number" min={-MOST_MARGIN} max={MOST_MARGIN} step="1" value={margin()} onInput={setMargin} data-try="margin" />
      </label>
      <label>
        Format
        <select value={tried.name} onChange={(event) => go({format: event.target.value})} data-try="format">
          {formatsToTry().map(([name]) => <option key={name} value={name}>{name.toUpperCase()}</option>)}
        </select>
      </label>
      <button type="button" data-try="in-use" onClick={() => go({scale: null, margin: null, format: null})}>As in use</button>
      <button
        type="button" data-try="current" title="largest finite value of the format / largest magnitude of the tensor"
        onClick={() => go({scale: currentScale(amax, tried.format), margin: null})}
      >
        Current scaling
      </button>
    </div>
  );
}

/** Height of the chart: as a share of the window's height, and the least and the largest height in pixels. */
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
  // Keep the axis while the user drags the window.
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
        <label title="also show magnitudes far below the window">
          <input type="checkbox" checked={whole} onChange={(event) => go({whole: event.target.checked ? 1 : null})} data-try="whole" />
          all magnitudes
        </label>
        {beyond > 0 && <span class="soft">{count(beyond)} values are outside of the shown range, {powerOfTwo(low)} to {powerOfTwo(high)}, but counted.</span>}
        {children}
      </div>
    </>
  );
}

/** Let the user drag the window. Dragging it to the right makes the scale smaller. */
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
    if (moved) go({}); // fit the axis to the new place of the window
  };
  area.on('mouseup', end);
  area.on('globalout', end);
}
