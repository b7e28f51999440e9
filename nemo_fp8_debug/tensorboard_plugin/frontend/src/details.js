// The steps and tensors of the selected runs.
import {computed, effect, signal} from '@preact/signals';
import {ask} from './names.js';
import {about, chosen, table, versionOf} from './records.js';

/** Answers of `run` for the selected runs, by part: each {data} or {error}. */
export const details = signal({});

effect(() => {
  const wanted = Object.entries(chosen.value).filter(([, name]) => name);
  const versions = wanted.map(([, name]) => versionOf(name));
  let current = true;
  Promise.all(
    wanted.map(([, name], i) => ask('run', {run: name, table: table.value}, versions[i]).then((data) => ({data}), (error) => ({error: error.message}))),
  ).then((found) => {
    if (current) details.value = Object.fromEntries(wanted.map(([part], i) => [part, found[i]]));
  });
  return () => (current = false);
});

/** Sampled steps of all selected runs, ascending. */
export const steps = computed(() => {
  const all = Object.values(details.value).flatMap(({data}) => data?.steps ?? []);
  return [...new Set(all)].sort((a, b) => a - b);
});

/**
 * The [first, last] of these steps, or null if unknown. For operands, the list of runs contains them before all steps are
 * read.
 */
export const stepsFromTo = computed(() => {
  if (steps.value.length) return [steps.value[0], steps.value.at(-1)];
  const listed = Object.values(chosen.value).map(about).filter((run) => run && run.first !== null);
  if (table.value !== 'metrics' || !listed.length) return null;
  return [Math.min(...listed.map(({first}) => first)), Math.max(...listed.map(({last}) => last))];
});
