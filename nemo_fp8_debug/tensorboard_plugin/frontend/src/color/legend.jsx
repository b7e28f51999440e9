// The legend of the colors: how many values have which color, and handles to set the limits.
import {number} from '../units.js';
import {CHOICES, currentChoice, offered, setLimits} from './scales.js';
import {go} from '../address.js';

const BARS = 48;
const NOTCHES = 400;
const percent = (share) => `${(100 * share).toFixed(2)}%`;

/**
 * @param {object} metric
 * @param {string} choice name of what the colors show
 * @param {object} scale result of `scaleOf`
 * @param {string} label name of the metric, with its unit
 * @param {Array<number>} automatic limits [low, high] that the values suggest
 * @param {?{values, counts}} distribution of the values; without `counts`, each value counts once
 * @param {Array<number>} counting thresholds of the values
 * @param {string} note a sentence
 * @param {boolean} set whether the user has set the limits
 * @param {boolean} fixed whether the user cannot set the limits
 */
export function Legend({metric, choice, scale, label, automatic, distribution, counting = [], note, set, fixed = false, show = number}) {
  const ends = [...automatic.map(scale.to), scale.low, scale.high];
  const domain = domainOf(ends, distribution, scale);
  const placed = (at) => (at - domain[0]) / (domain[1] - domain[0]);
  const low = show(scale.from(scale.low));
  const high = show(scale.from(scale.high));
  const move = (end) => (event) => {
    const at = domain[0] + (event.target.valueAsNumber / NOTCHES) * (domain[1] - domain[0]);
    const moved = end ? [scale.low, at] : [at, scale.high];
    if (moved[0] < moved[1]) setLimits(metric, choice, moved.map(scale.from));
  };
  const handle = (end, name, at, text) => (
    <input
      type="range" min="0" max={NOTCHES} value={Math.round(NOTCHES * placed(at))} onInput={move(end)} data-limit={end ? 'high' : 'low'}
      aria-label={`${name} limit of the colors of ${label}`} aria-valuetext={text}
    />
  );
  return (
    <div class="legend" role="group" aria-label={`Colors: ${label}, from ${low} to ${high}`}>
      <span class="soft">{label}</span>
      <div class="scale">
        <Bars bars={barsOf(distribution, scale, domain)} counting={counting.map((value) => placed(scale.to(value)))} />
        <div class="ramp" style={{background: gradientOf(scale, placed)}} />
        {!fixed && <div class="handles">{handle(0, 'Lower', scale.low, low)}{handle(1, 'Upper', scale.high, high)}</div>}
        <div class="ticks">
          <span style={{left: percent(placed(scale.low))}}>{low}</span>
          <span style={{left: percent(placed(scale.high)), transform: 'translateX(-100%)'}}>{high}</span>
        </div>
      </div>
      <span class="soft small-note">
        {note} {counting.length > 0 && <>Marked: the threshold. </>}
        {set && <button type="button" class="small" onClick={() => setLimits(metric, choice, null)}>Automatic limits</button>}
      </span>
    </div>
  );
}

/** Bars that show how many values have which color. The height is the logarithm of the number. */
function Bars({bars, counting}) {
  const most = Math.log1p(Math.max(1, ...bars));
  return (
    <svg class="bars" viewBox={`0 0 ${BARS} 1`} preserveAspectRatio="none" aria-hidden="true">
      {bars.map((count, i) => count > 0 && <rect key={i} x={i} width="0.9" y={1 - Math.log1p(count) / most} height={Math.log1p(count) / most} />)}
      {counting.filter((at) => at >= 0 && at <= 1).map((at) => <line key={at} x1={at * BARS} x2={at * BARS} y1="0" y2="1" />)}
    </svg>
  );
}

function domainOf(ends, distribution, scale) {
  let [low, high] = [Math.min(...ends), Math.max(...ends)];
  for (const value of distribution?.values ?? []) {
    const at = scale.to(value);
    if (Number.isFinite(at)) [low, high] = [Math.min(low, at), Math.max(high, at)];
  }
  return [low, high > low ? high : low + 1];
}

function barsOf(distribution, scale, [low, high]) {
  const bars = new Array(BARS).fill(0);
  const {values = [], counts} = distribution ?? {};
  for (let i = 0; i < values.length; i += 1) {
    const at = Math.floor(((scale.to(values[i]) - low) / (high - low)) * BARS);
    if (at >= 0) bars[Math.min(at, BARS - 1)] += counts ? counts[i] : 1;
  }
  return bars;
}

/** Return the color ramp between the handles. Beyond the handles, it has the colors of its ends. */
function gradientOf({colors, low, high, center}, placed) {
  const at = (share) => (center === null ? low + share * (high - low) : share < 0.5 ? low + 2 * share * (center - low) : center + (2 * share - 1) * (high - center));
  return `linear-gradient(90deg, ${colors.map((color, i) => `${color} ${percent(placed(at(i / (colors.length - 1))))}`).join(', ')})`;
}

/** The choice of what the colors show. */
export function Choice() {
  return (
    <label>
      Colors
      <select value={currentChoice()} onChange={(event) => go({color: event.target.value})} data-picker="color">
        {offered().map((name) => <option key={name} value={name}>{CHOICES[name]}</option>)}
      </select>
    </label>
  );
}
