// The page uses the baseline's layer names, as the verdict does. Questions to each run use the run's own names.
import {effect} from '@preact/signals';
import {at, go} from './address.js';
import {fetched, there} from './kept.js';
import {chosen, versionOf} from './records.js';

/** Key of the columns of tensors in the answers of each route. An empty key means that the answer itself has the columns. */
const COLUMNS = {frames: '', course: '', spread: '', run: 'tensors', others: 'rows', what_if: 'rows'};
const SAME = {names: {}, how: ''};

/**
 * Return the question for the baseline's names of a run's layers, or null if the run is the baseline or there is no
 * baseline.
 */
export function namesOf(run) {
  const {baseline} = chosen.value;
  return run && baseline && run !== baseline ? ['names', {run, baseline}, versionOf(run, baseline)] : null;
}

/** Return this question for the run of another question. Return null also if that question has nothing to do with layers. */
export const namesIn = (route, {run, layer}) => (layer !== undefined || route in COLUMNS ? namesOf(run) : null);

/**
 * Return the answer to a question. It is cached as long as the record does not change.
 * @param {string} route
 * @param {object} parameters
 * @param {string} version version of the records that the question is about
 */
export function ask(route, parameters = {}, version = '') {
  const question = namesIn(route, parameters);
  if (!question) return fetched(route, parameters, version);
  const names = fetched(...question).catch(() => SAME);
  const answer = parameters.layer === undefined ? fetched(route, parameters, version) : names.then((found) => fetched(route, asOwn(parameters, found), version));
  return Promise.all([answer, names]).then(([data, found]) => renamed(route, data, found));
}

/** Return an answer that has arrived, or undefined if it was not requested or is still awaited. */
export function known(route, parameters, version) {
  const question = namesIn(route, parameters);
  const found = question ? there(...question) : SAME;
  const data = found && there(route, asOwn(parameters, found), version);
  return data && renamed(route, data, found);
}

/** Convert a stored answer from the run's own names to the baseline's names. */
export function called(route, parameters, data) {
  const question = namesIn(route, parameters);
  return renamed(route, data, (question && there(...question)) ?? SAME);
}

const asOwn = (parameters, found) => (parameters.layer === undefined ? parameters : {...parameters, layer: ownName(parameters.layer, found)});

const owns = new WeakMap();

/** Return the run's own name of a layer. */
function ownName(layer, found) {
  if (!owns.has(found)) owns.set(found, new Map(Object.entries(found.names).map(([own, name]) => [name, own])));
  return owns.get(found).get(layer) ?? layer;
}

const made = new WeakMap();

/** Return an answer in the baseline's names: the same object for the same answers. */
function renamed(route, data, found) {
  if (!(route in COLUMNS) || !Object.keys(found.names).length) return data;
  if (made.get(data)?.found !== found) made.set(data, {found, data: inNames(COLUMNS[route], data, found)});
  return made.get(data).data;
}

function inNames(place, data, {names}) {
  if (place) return {...data, [place]: inNames('', data[place], {names})};
  return {...data, layer: data.layer.map((layer) => names[layer] ?? layer)};
}

let last = {found: SAME};

// If another baseline has another name for the selected layer, change the name in the address, so that the tensor stays the
// same.
effect(() => {
  const {run} = chosen.value;
  const question = namesOf(run);
  let current = true;
  (question ? fetched(...question) : Promise.resolve(SAME)).then((found) => {
    if (!current) return;
    const own = last.run === run ? ownName(at('layer'), last.found) : at('layer');
    const layer = found.names[own] ?? own;
    last = {run, found};
    if (layer !== at('layer')) go({layer});
  }, () => {});
  return () => (current = false);
});
