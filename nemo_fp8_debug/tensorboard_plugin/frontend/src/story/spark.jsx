// A metric of a tensor as a small picture: the runs, the baseline's band, and where the loss and the tensor go their own way.
import {COLORS, dark, inks, STROKES} from '../theme.js';

const [WIDTH, HEIGHT, PAD] = [300, 64, 3];
const DASHES = {solid: undefined, dashed: '5 3', dotted: '1.5 2.5'};
const DECADE = 10;

/**
 * @param {string} label what is shown, in a sentence
 * @param {Array<{part, step: number[], values: Array<?number>}>} lines
 * @param {?{step, low, high}} band
 * @param {Array<{kind, step}>} markers
 * @param {number[]} missing steps at which ranks were missing
 */
export function Spark({label, lines, band, markers, missing}) {
  if (!lines.length) return null;
  const ink = inks(dark.value);
  const {x, y} = scales(lines);
  const path = (step, values) => values.map((value, i) => (y(value) === null ? '' : `${i && y(values[i - 1]) !== null ? 'L' : 'M'}${x(step[i])},${y(value)}`)).join('');
  return (
    <svg class="spark" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={label} preserveAspectRatio="none">
      {band && <polygon points={outline(band, x, y)} fill={COLORS.baseline} opacity="0.16" />}
      {markers.map(({kind, step}) => (
        <line
          key={kind} data-marker={kind} data-step={step} x1={x(step)} x2={x(step)} y1="0" y2={HEIGHT} vector-effect="non-scaling-stroke"
          stroke={kind === 'leaves' ? COLORS.run : ink.text} stroke-width="1.4" stroke-dasharray={kind === 'diverges' ? '4 3' : undefined}
        />
      ))}
      {missing.length > 0 && <path data-marker="missing" d={missing.map((step) => `M${x(step)},${HEIGHT}v-12`).join('')} stroke={ink.text} stroke-width="2" vector-effect="non-scaling-stroke" />}
      {lines.map(({part, step, values}) => (
        <path key={part} d={path(step, values)} fill="none" stroke={COLORS[part]} stroke-width="1.8" stroke-dasharray={DASHES[STROKES[part]]} vector-effect="non-scaling-stroke" />
      ))}
    </svg>
  );
}

/** From steps and values to places; null of a value that has none. Logarithmic where values span a decade. */
function scales(lines) {
  const steps = lines.flatMap(({step}) => [step[0], step[step.length - 1]]);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const values = lines.flatMap((line) => line.values.filter(Number.isFinite));
  const [least, most] = [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
  const log = least > 0 && most >= DECADE * least;
  const to = log ? Math.log : (value) => value;
  const [low, high] = [to(least), to(most)];
  const inside = HEIGHT - 2 * PAD;
  const clipped = (value) => Math.max(0, Math.min(HEIGHT, value));
  return {
    x: (step) => Number((((step - first) / Math.max(last - first, 1)) * WIDTH).toFixed(1)),
    y: (value) => (!Number.isFinite(value) || (log && value <= 0) ? null : Number(clipped(PAD + inside * (1 - (to(value) - low) / (high - low || 1))).toFixed(1))),
  };
}

function outline({step, low, high}, x, y) {
  const known = step.flatMap((_, i) => (low[i] === null && high[i] === null ? [] : [i]));
  const above = known.map((i) => `${x(step[i])},${y(high[i]) ?? 0}`);
  const below = known.map((i) => `${x(step[i])},${y(low[i]) ?? HEIGHT}`);
  return [...above, ...below.reverse()].join(' ');
}
