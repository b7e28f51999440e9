// The choice of runs to show in addition to run, baseline and reference run, and questions about each shown run.
import {useRef} from 'preact/hooks';
import {versionOf} from '../records.js';
import {useAnswer} from '../server.js';
import {beside, candidates, isFull, leftOut, lineOf, MOST, shownRuns, turnPin} from './beside.js';

// The same question about each shown run.
/**
 * Return {data, error, loading} by key of `shownRuns`. If the question fails for one run, the other runs keep their answers.
 * The answer about a run stays until the next answer about the same run, and is never shown for another run.
 * @param {function} questionOf function of a run's name that returns [route, parameters], or nothing to ask nothing
 */
export function useRuns(questionOf) {
  const runs = Object.entries(shownRuns.value).filter(([, name]) => name);
  const answered = useRef([]);
  const answers = {};
  for (let i = 0; i < MOST; i += 1) {
    const [key, name] = runs[i] ?? [];
    const [route, parameters] = (name && questionOf(name)) || [];
    const answer = useAnswer(route, parameters, versionOf(name));
    if (!answer.loading) answered.current[i] = name;
    if (key) answers[key] = answered.current[i] === name ? answer : {loading: true};
  }
  return answers;
}

/** Return the data by key, or undefined for runs without an answer. */
export const dataOf = (answers) => Object.fromEntries(Object.entries(answers).map(([key, {data}]) => [key, data ?? undefined]));

/** Return whether any answer is awaited. */
export const isAwaited = (answers) => Object.values(answers).some(({data, error}) => data === undefined && !error);

/** The errors of questions about single runs. */
export function Problems({answers}) {
  const said = answers.flatMap((of) => Object.entries(of).map(([key, {error}]) => error && `${shownRuns.value[key]}: ${error}`)).filter(Boolean);
  return said.length ? <ul class="notes" role="status">{said.map((line) => <li key={line}>{line}</li>)}</ul> : null;
}

/** A sample of a run's line. */
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
          <legend class="soft">Further runs, next to run, baseline and reference run; at most {MOST} runs in all. Pin them in the table of runs.</legend>
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
      {leftOut.value > 0 && <span class="soft" role="status">{leftOut.value} more {leftOut.value === 1 ? 'is' : 'are'} pinned but not shown: at most {MOST} runs.</span>}
    </div>
  );
}
