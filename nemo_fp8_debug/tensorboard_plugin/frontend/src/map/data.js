// What the map shows: one metric of all tensors of each run at a step, and where each tensor stands.
import {computed, signal} from '@preact/signals';
import {useEffect, useRef} from 'preact/hooks';
import {tensor} from '../address.js';
import {currentStep} from '../components/steps.jsx';
import {details} from '../details.js';
import {ask, known} from '../names.js';
import {chosen, table, versionOf} from '../records.js';
import {useAnswers} from '../server.js';
import {placeOf, ROLES, shown} from '../units.js';

// Tensors that samples of a run have and its newest one lacks, as experts that got no token.
export const keyOf = (layer, role) => `${role} ${layer}`;

/** By run, by key: {layer, role, kind, depth}. */
export const met = signal(new Map());
const seen = new WeakSet();

const keys = new WeakMap();

function keysOf(tensors) {
  if (!keys.has(tensors)) keys.set(tensors, new Set(tensors.layer.map((layer, i) => keyOf(layer, tensors.role[i]))));
  return keys.get(tensors);
}

/**
 * Take in the tensors of a run's chunk.
 * @param {{layer: string[], role: string[]}} tensors that the newest sample has
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

// Where each tensor stands on the map: layers of the model down, what is in them across.
/** {named, rows, columns, groups, cells, tensors}: whether rows are names of layers, names of both, which columns are of one kind of GEMM, [column, row, tensors] of each cell that has any, and all; of all runs. */
export const cells = computed(() => {
  const all = [...tensorsOfAll().values()];
  // Layers that have no number stand one under the other by their names.
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

// What a map shows in each of its places.
/**
 * The places with their values: {column, row, tensor, value, number, tensors}; of several tensors in a place the worst.
 * @param {function} of a tensor's layer and role: its value, NaN where there is none
 * @param {function} badness of a number, more for worse
 * @param {function} numberOf layer, role and value: what is colored
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

/** The worst of values; null where there is none. */
export const worstOf = (values, badness) =>
  values.reduce((worst, one) => (Number.isNaN(one.number) || (worst && badness(one.number) <= badness(worst.number)) ? worst : one), null);

/** Whether the tensor that is looked at is in this place. */
export const isChosen = ({tensors}) => tensors.some(({layer, role}) => layer === tensor.value?.layer && role === tensor.value?.role);

// One metric of all tensors at the step that is looked at, of each run; read in chunks of steps, the next one ahead.
const CHUNK = 64;
// What is drawn comes first, and somebody who jumps about wants nothing of what lies between.
const PAUSE_MS = 150;
const places = new WeakMap();

/** Where each tensor is among those of a chunk. */
function placesIn(chunk) {
  if (!places.has(chunk)) places.set(chunk, new Map(chunk.layer.map((layer, i) => [keyOf(layer, chunk.role[i]), i])));
  return places.get(chunk);
}

const question = (part, metric, from, to) => {
  const run = chosen.value[part];
  return ['frames', {run, metric, from, to, table: table.value}, versionOf(run)];
};

/** The question for a chunk of a run's steps; null where there is none. */
function chunkOf(part, metric, chunk) {
  const steps = details.value[part]?.data?.steps ?? [];
  const [from, to] = [steps[chunk * CHUNK], steps[Math.min((chunk + 1) * CHUNK, steps.length) - 1]];
  return from === undefined ? null : question(part, metric, from, to);
}

const samplesOf = new WeakMap();

/** A sample: its step, and the value of each tensor (NaN: none); the same object each time. */
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

/** {samples: by part, error}: the samples at the step, or the last that were there while they are read. */
export function useSamples(metric, parts) {
  const step = currentStep();
  const steps = parts.map((part) => details.value[part]?.data?.steps ?? []);
  const at = steps.map((all) => placeOf(all, step));
  const chunks = at.map((place) => Math.floor(place / CHUNK));
  // A step by itself is there at once, and the chunk around it for the steps that follow.
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
