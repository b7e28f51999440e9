// One metric of all tensors at the step that is looked at, of each run; read in chunks of steps, the next one ahead.
import {useEffect, useRef} from 'preact/hooks';
import {currentStep} from '../components/steps.jsx';
import {details} from '../details.js';
import {chosen, table, versionOf} from '../records.js';
import {keyOf, meet} from './met.js';
import {ask, known} from '../names.js';
import {useAnswers} from '../server.js';
import {placeOf} from '../units.js';

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
