// Layers are called as the baseline calls them, which is how the verdict does: each run is asked in its own names.
import {effect} from '@preact/signals';
import {at, go} from './address.js';
import {fetched, there} from './kept.js';
import {chosen, versionOf} from './records.js';

/** Where the answers of a route have columns of tensors; '': they are such columns. */
const COLUMNS = {frames: '', course: '', spread: '', run: 'tensors', others: 'rows', what_if: 'rows'};
const SAME = {names: {}, how: ''};

/** The question what the baseline calls the layers of a run; null: it is the baseline, or there is none. */
export function namesOf(run) {
  const {baseline} = chosen.value;
  return run && baseline && run !== baseline ? ['names', {run, baseline}, versionOf(run, baseline)] : null;
}

/** The same of the run that a question is about; null where no layer is named, too. */
export const namesIn = (route, {run, layer}) => (layer !== undefined || route in COLUMNS ? namesOf(run) : null);

/**
 * The answer to a question, kept as long as the record it is about stays the same.
 * @param {string} route
 * @param {object} parameters
 * @param {string} version of the records asked about
 */
export function ask(route, parameters = {}, version = '') {
  const question = namesIn(route, parameters);
  if (!question) return fetched(route, parameters, version);
  const names = fetched(...question).catch(() => SAME);
  const answer = parameters.layer === undefined ? fetched(route, parameters, version) : names.then((found) => fetched(route, asOwn(parameters, found), version));
  return Promise.all([answer, names]).then(([data, found]) => renamed(route, data, found));
}

/** An answer that is there already; undefined: it was not asked for, or is awaited. */
export function known(route, parameters, version) {
  const question = namesIn(route, parameters);
  const found = question ? there(...question) : SAME;
  const data = found && there(route, asOwn(parameters, found), version);
  return data && renamed(route, data, found);
}

/** An answer that was kept as it was given. */
export function called(route, parameters, data) {
  const question = namesIn(route, parameters);
  return renamed(route, data, (question && there(...question)) ?? SAME);
}

const asOwn = (parameters, found) => (parameters.layer === undefined ? parameters : {...parameters, layer: ownName(parameters.layer, found)});

const owns = new WeakMap();

/** What a run itself calls a layer. */
function ownName(layer, found) {
  if (!owns.has(found)) owns.set(found, new Map(Object.entries(found.names).map(([own, name]) => [name, own])));
  return owns.get(found).get(layer) ?? layer;
}

const made = new WeakMap();

/** The same object for the same answers. */
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

// The tensor in the address stays the same where another baseline calls its layer otherwise.
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
