// Which runs are shown beside run, baseline and reference run, and how their lines are drawn.
import {turnPin} from './choice.js';
import {beside, candidates, isFull, leftOut, lineOf, MOST, shownRuns} from './beside.js';

/** A piece of a run's line. */
export function Stroke({of}) {
  if (!shownRuns.value[of]) return null;
  const {color, type} = lineOf(of);
  if (!Array.isArray(type)) return <span class={`swatch ${of}`} aria-hidden="true" />;
  return <svg class="stroke" viewBox="0 0 30 4" aria-hidden="true"><line x2="30" y1="2" y2="2" style={{stroke: color, strokeDasharray: type}} /></svg>;
}

export function AlsoShow() {
  const names = beside.value.map(({name}) => name);
  if (!candidates.value.length) return null;
  return (
    <div class="controls beside">
      <details class="choices">
        <summary>Also show: {names.length || 'no'} other run{names.length === 1 ? '' : 's'}</summary>
        <fieldset class="controls">
          <legend class="soft">Beside run, baseline and reference run; at most {MOST} runs in all. These runs are pinned in the table of runs.</legend>
          {candidates.value.map((name) => (
            <label key={name}>
              <input type="checkbox" checked={names.includes(name)} disabled={isFull.value && !names.includes(name)} onChange={() => turnPin(name)} data-also={name} />
              {name}
            </label>
          ))}
        </fieldset>
      </details>
      {beside.value.map(({key, name}) => (
        <span key={name} class="beside-run" data-beside={name}>
          <Stroke of={key} /> {name} <button type="button" class="small" onClick={() => turnPin(name)} aria-label={`Do not show ${name}`}>×</button>
        </span>
      ))}
      {leftOut.value > 0 && <span class="soft" role="status">{leftOut.value} more {leftOut.value === 1 ? 'is' : 'are'} pinned and not shown: {MOST} runs at most.</span>}
    </div>
  );
}
