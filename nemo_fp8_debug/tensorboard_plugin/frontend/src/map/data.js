// The data of the map: one metric of all tensors of each run at a step, and the cell of each tensor.
import {computed, signal} from '@preact/signals';
import {useEffect, useRef} from 'preact/hooks';
import {tensor} from '../address.js';
import {currentStep} from '../components/steps.jsx';
import {details} from '../details.js';
import {ask, known} from '../names.js';
import {chosen, table, versionOf} from '../records.js';
import {useAnswers} from '../server.js';
import {placeOf, ROLES, shown} from '../units.js';

// Tensors that are in earlier samples of a run, but not in the newest sample, such as experts that received no tokens.
export const keyOf = (layer, role) => `${role} ${layer}`;

/** These tensors {layer, role, kind, depth}, by table and run, and then by key. */
export const met = signal(new Map());
const seen = new WeakSet();

const keys = new WeakMap();

function keysOf(tensors) {
  if (!keys.has(tensors)) keys.set(tensors, new Set(tensors.layer.map((layer, i) => keyOf(layer, tensors.role[i]))));
  return keys.get(tensors);
}

/**
 * Add the tensors of a run's chunk to `met`.
 * @param {{layer: string[], role: string[]}} tensors those of the newest sample
 */
export function meet(run, chunk, tensors) {
  if (!chunk || seen.has(chunk)) return;
  seen.add(chunk);
  const newest = keysOf(tensors);
  const before = met.value.get(run) ?? new Map();
  const more = new Map(before);
  for (const [i, layer] of chunk.layer.entries()) {
    const role = chunk.role[i];
    if (!newest.has(keyOf(layer, role))) more.set(keyOf(layer, role), {layer, role, kind: chunk.kind[i], depth: chunk.depth[i]});
  }
  if (more.size > before.size) met.value = new Map([...met.value, [run, more]]);
}

// The cell of each tensor on the map. Rows are layers of the model, and columns are the tensors of a layer.
/**
 * The cells for all runs. `named`: whether rows are names of layers. `rows`, `columns`: their labels. `groups`: the columns
 * of each kind of GEMM. `cells`: [column, row, tensors] of each cell with tensors. `tensors`: all tensors.
 */
export const cells = computed(() => {
  const all = [...tensorsOfAll().values()];
  // If no layer has a number, each layer is a row with its name.
  const named = all.every(({depth}) => depth === null);
  const placed = all.map((tensor) => (named ? {tensor, row: tensor.layer, group: ''} : {tensor, row: tensor.depth, group: tensor.kind}));
  const rows = [...new Set(placed.map(({row}) => row))];
  if (!named) rows.sort((a, b) => (a ?? Infinity) - (b ?? Infinity));
  const groups = [...new Set(placed.map(({group}) => group))];
  const there = new Set(placed.map(({tensor, group}) => keyOf(group, tensor.role)));
  const columns = groups.flatMap((group) => ROLES.map((role) => ({group, role})).filter(({role}) => there.has(keyOf(group, role))));
  const columnOf = new Map(columns.map(({group, role}, i) => [keyOf(group, role), i]));
  const rowOf = new Map(rows.map((row, i) => [row, i]));
  const found = new Map();
  for (const {tensor, row, group} of placed) {
    const [x, y] = [columnOf.get(keyOf(group, tensor.role)), rowOf.get(row)];
    const place = y * columns.length + x;
    if (!found.has(place)) found.set(place, [x, y, []]);
    found.get(place)[2].push(tensor);
  }
  return {
    named,
    rows: rows.map((row) => (row === null ? 'outside' : String(row))),
    columns: columns.map(({role}) => shown(role)),
    groups: groups.map((group) => ({label: group, from: columns.findIndex((one) => one.group === group), count: columns.filter((one) => one.group === group).length})),
    cells: [...found.values()],
    tensors: all,
  };
});

function tensorsOfAll() {
  const tensors = new Map();
  for (const {data} of Object.values(details.value)) {
    for (const [i, layer] of (data?.tensors.layer ?? []).entries()) {
      const {role, kind, depth} = data.tensors;
      tensors.set(keyOf(layer, role[i]), {layer, role: role[i], kind: kind[i], depth: depth[i]});
    }
  }
  for (const run of Object.values(chosen.value)) for (const [key, tensor] of met.value.get(`${table.value} ${run}`) ?? []) if (!tensors.has(key)) tensors.set(key, tensor);
  return tensors;
}

// What a map shows in each of its cells.
/**
 * Return the cells with their values: {column, row, tensor, value, number, tensors}. A cell with several tensors shows the
 * worst.
 * @param {function} of function of a layer and a role that returns the tensor's value, or NaN if it has none
 * @param {function} badness function that rates a number: worse numbers get larger ratings
 * @param {function} numberOf function of layer, role and value that returns the number that the color shows
 */
export function valuesOf(of, badness, numberOf = (layer, role, value) => value) {
  return cells.value.cells.map(([column, row, tensors]) => {
    let [worst, value, number] = [tensors[0], NaN, NaN];
    for (const one of tensors) {
      const mine = of(one.layer, one.role);
      const its = numberOf(one.layer, one.role, mine);
      if (Number.isNaN(value) || (!Number.isNaN(its) && !(badness(its) <= badness(number)))) [worst, value, number] = [one, mine, its];
    }
    return {column, row, tensor: worst, value, number, tensors};
  });
}

/** Return the cell with the worst value, or null if no cell has a value. */
export const worstOf = (values, badness) =>
  values.reduce((worst, one) => (Number.isNaN(one.number) || (worst && badness(one.number) <= badness(worst.number)) ? worst : one), null);

/** Return whether the selected tensor is in this cell. */
export const isChosen = ({tensors}) => tensors.some(({layer, role}) => layer === tensor.value?.layer && role === tensor.value?.role);

// One metric of all tensors of each run at the selected step. We read it in chunks of steps, and the neighboring chunks
// ahead.
const CHUNK = 64;
// Wait before reading ahead: drawing comes first, and a user who jumps between steps does not need the chunks in between.
const PAUSE_MS = 150;
const places = new WeakMap();

/** Return the index of each tensor in a chunk, by key. */
function placesIn(chunk) {
  if (!places.has(chunk)) places.set(chunk, new Map(chunk.layer.map((layer, i) => [keyOf(layer, chunk.role[i]), i])));
  return places.get(chunk);
}

const question = (part, metric, from, to) => {
  const run = chosen.value[part];
  return ['frames', {run, metric, from, to, table: table.value}, versionOf(run)];
};

/** Return the question for a chunk of a run's steps, or null if there is no such chunk. */
function chunkOf(part, metric, chunk) {
  const steps = details.value[part]?.data?.steps ?? [];
  const [from, to] = [steps[chunk * CHUNK], steps[Math.min((chunk + 1) * CHUNK, steps.length) - 1]];
  return from === undefined ? null : question(part, metric, from, to);
}

const samplesOf = new WeakMap();

/**
 * Return a sample: its step, and a function that returns the value of a tensor (NaN: no value). Return the same object each
 * time.
 */
function sampleOf(chunk, step) {
  if (!samplesOf.has(chunk)) samplesOf.set(chunk, new Map());
  const made = samplesOf.get(chunk);
  if (!made.has(step)) made.set(step, sampled(chunk, step));
  return made.get(step);
}

function sampled(chunk, step) {
  const row = chunk.steps.indexOf(step);
  if (row < 0) return null;
  const width = chunk.layer.length;
  const at = placesIn(chunk);
  const of = (layer, role) => {
    const column = at.get(keyOf(layer, role));
    return column === undefined ? NaN : chunk.values[row * width + column];
  };
  return {step, of};
}

/**
 * Return {samples, error}: by part, the sample at the selected step. While a sample is being read, return the one before it.
 */
export function useSamples(metric, parts) {
  const step = currentStep();
  const steps = parts.map((part) => details.value[part]?.data?.steps ?? []);
  const at = steps.map((all) => placeOf(all, step));
  const chunks = at.map((place) => Math.floor(place / CHUNK));
  // Ask for the single step first, because its answer is fast. The chunk around it is read afterwards, for the next steps.
  const questions = parts.map((part, i) => {
    const whole = chunkOf(part, metric, chunks[i]);
    const alone = steps[i][at[i]];
    return !whole || known(...whole) ? whole : question(part, metric, alone, alone);
  });
  const {data, error} = useAnswers(questions);
  const shown = useRef({});

  useEffect(() => {
    if (!data) return undefined;
    const timer = setTimeout(() => {
      for (const by of [0, 1, -1]) for (const [i, part] of parts.entries()) ahead(chunkOf(part, metric, chunks[i] + by));
    }, PAUSE_MS);
    return () => clearTimeout(timer);
  }, [data]);

  useEffect(() => parts.forEach((part, i) => details.value[part]?.data && meet(`${table.value} ${chosen.value[part]}`, data?.[i], details.value[part].data.tensors)), [data]);

  const samples = {};
  for (const [i, part] of parts.entries()) {
    const chunk = data?.[i];
    const sample = chunk && sampleOf(chunk, steps[i][at[i]]);
    const before = shown.current[part];
    samples[part] = sample ?? (before?.run === chosen.value[part] && before?.metric === metric && before?.table === table.value ? before.sample : null);
    if (sample) shown.current[part] = {run: chosen.value[part], metric, table: table.value, sample};
  }
  return {samples, error};
}

function ahead(asked) {
  if (asked) ask(...asked).catch(() => {});
}
