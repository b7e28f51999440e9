// The same question about each run that is shown.
import {useRef} from 'preact/hooks';
import {versionOf} from '../records.js';
import {useAnswer} from '../server.js';
import {MOST, shownRuns} from './beside.js';

/**
 * By key of `shownRuns`, {data, error, loading}; a run that cannot answer leaves the others be. What was answered about a run
 * stays until it answers anew, and never stands for another run.
 * @param {function} questionOf of a run's name: [route, parameters], or nothing
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

/** By key, what was answered; undefined where nothing was. */
export const dataOf = (answers) => Object.fromEntries(Object.entries(answers).map(([key, {data}]) => [key, data ?? undefined]));

/** By key, whether it is awaited. */
export const isAwaited = (answers) => Object.values(answers).some(({data, error}) => data === undefined && !error);

/** Runs that could not answer, in words. */
export function Problems({answers}) {
  const said = answers.flatMap((of) => Object.entries(of).map(([key, {error}]) => error && `${shownRuns.value[key]}: ${error}`)).filter(Boolean);
  return said.length ? <ul class="notes" role="status">{said.map((line) => <li key={line}>{line}</li>)}</ul> : null;
}
