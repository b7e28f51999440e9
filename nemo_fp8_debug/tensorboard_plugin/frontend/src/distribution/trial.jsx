// The handles: scale, margin and format to try.
import '@preact/signals';
import {at, go} from '../address.js';
import {asScale, currentScale} from '../cast.js';
import {number, powerOfTwo, precise} from '../units.js';
import {formatsToTry, margin, MOST_MARGIN} from './cuts.js';

const REACH = 24;
/** Scales are tried in eighths of a power of two. */
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
      <label title="the scale is divided by 2 to the power of it">
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
