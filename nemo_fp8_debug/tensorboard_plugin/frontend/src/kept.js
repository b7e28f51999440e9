// Asks the source for answers, and caches the most recently used answers.
import {source} from './source.js';

const KEPT = 400;
/** Cached answers by key, the most recently used last. */
const answers = new Map();
/** Answers that have not arrived yet. */
export const awaited = new Set();

const keyOf = (route, parameters, version) => `${version} ${source.nameOf(route, parameters)}`;

function used(key) {
  const answer = answers.get(key);
  if (answers.delete(key)) answers.set(key, answer);
  return answer;
}

/** Return the answer to a question, as `ask` in names.js does, but with the layer names of the record. */
export function fetched(route, parameters = {}, version = '') {
  const key = keyOf(route, parameters, version);
  if (!answers.has(key)) {
    const answer = source.answer(route, parameters);
    awaited.add(answer);
    answer.then((data) => (answer.data = data), () => answers.delete(key)).then(() => awaited.delete(answer));
    answers.set(key, answer);
    if (answers.size > KEPT) answers.delete(answers.keys().next().value);
  }
  return used(key);
}

/** Return an answer that has arrived, or undefined if it was not requested or is still awaited. */
export const there = (route, parameters, version) => used(keyOf(route, parameters, version))?.data;

/** Ask again each time, without the cache. */
export const askAgain = (route, parameters = {}) => source.answer(route, parameters);
