// Hooks with which views ask questions and get answers.
import {useEffect, useRef, useState} from 'preact/hooks';
import {askAgain, awaited} from './kept.js';
import {ask, known, namesIn} from './names.js';
import {source} from './source.js';

const WAITING = {loading: true};
const RETRY_MS = 5000;

/**
 * Return {data, error, loading} of several questions. The data of earlier questions stays until the new data has arrived.
 * Failed questions are asked again while the page is visible.
 * @param {Array<?[string, object, string]>} questions arguments for `ask` in names.js, or null to ask nothing
 */
export function useAnswers(questions) {
  const key = JSON.stringify(questions.map((question) => question && [question, namesIn(...question)]));
  const [found, keep] = useState({});
  const answered = useRef({});
  const there = questions.map((question) => (question ? known(...question) : null));
  const all = there.every((data) => data !== undefined);
  useEffect(() => {
    if (all) return undefined;
    let timer;
    let wanted = true;
    const later = () => (timer = setTimeout(() => (document.visibilityState === 'visible' ? look() : later()), RETRY_MS));
    const look = () =>
      Promise.all(questions.map((question) => question && ask(...question))).then(
        (data) => wanted && keep({data, key}),
        (error) => {
          if (!wanted) return;
          keep({error: error.message, key});
          later();
        },
      );
    look();
    return () => {
      wanted = false;
      clearTimeout(timer);
    };
  }, [key]);
  const old = answered.current.key !== key || answered.current.error;
  if (all && old) answered.current = {data: there, key};
  else if (found.key === key && old) answered.current = found;
  return answered.current.key === key ? answered.current : {data: answered.current.data, loading: true};
}

/** Return {data, error, loading} of one question. Without a route, ask nothing. */
export function useAnswer(route, parameters, version) {
  const {data, ...rest} = useAnswers([route ? [route, parameters, version] : null]);
  return {data: data?.[0], ...rest};
}

const AGAIN_MS = 1000;
/** Milliseconds without requests after which a view has all answers, and longest time in milliseconds to wait for this. */
const [CALM_MS, PATIENCE_MS] = [150, 5000];

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

/** Wait until the view has all its answers, because a job would slow these down. */
export async function calm() {
  const until = performance.now() + PATIENCE_MS;
  do {
    await Promise.race([Promise.allSettled(awaited), pause(until - performance.now())]);
    await pause(source.live ? CALM_MS : 0);
  } while (awaited.size && performance.now() < until);
}

/**
 * Ask about a job, which takes the server some time, until the job is done.
 * @param {function} tell function that receives {loading, seconds, partial}, then {data} or {error}
 * @param {?Promise} after promise to wait for before asking, or null to ask now
 * @returns {function} function that stops asking
 */
export function watchJob(route, parameters, tell, after = null) {
  let timer;
  let wanted = true;
  const look = () =>
    askAgain(route, parameters).then(
      (job) => {
        if (!wanted) return;
        if (job.state === 'working') {
          tell({loading: true, seconds: job.seconds, partial: job.partial});
          timer = setTimeout(look, AGAIN_MS);
        } else tell(job.state === 'done' ? {data: job.result} : {error: job.error});
      },
      (error) => wanted && tell({error: error.message}),
    );
  if (after) after.then(() => wanted && look());
  else look();
  return () => {
    wanted = false;
    clearTimeout(timer);
  };
}

/** Return {data, error, seconds, partial} of a job. */
export function useJob(route, parameters, version) {
  const key = route && JSON.stringify([route, parameters, version]);
  const [found, keep] = useState(WAITING);
  useEffect(() => {
    if (!key) return undefined;
    keep(WAITING);
    return watchJob(route, parameters, keep);
  }, [key]);
  return found;
}
