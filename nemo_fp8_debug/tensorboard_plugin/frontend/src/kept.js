// Questions to what knows the records, and their answers as long as they are worth something.
import {source} from './source.js';

const KEPT = 400;
/** The last ones are those that were used last. */
const answers = new Map();
/** Answers that are not there yet. */
export const awaited = new Set();

const keyOf = (route, parameters, version) => `${version} ${source.nameOf(route, parameters)}`;

function used(key) {
  const answer = answers.get(key);
  if (answers.delete(key)) answers.set(key, answer);
  return answer;
}

/** The answer to a question, as of `ask` of names.js, with the names of layers that the record has. */
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

/** An answer that is there already; undefined: it was not asked for, or is awaited. */
export const there = (route, parameters, version) => used(keyOf(route, parameters, version))?.data;

/** What is asked anew each time. */
export const askAgain = (route, parameters = {}) => source.answer(route, parameters);
