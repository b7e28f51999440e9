// What there is to know of the runs that are looked at: their steps and their tensors.
import {computed, effect, signal} from '@preact/signals';
import {ask} from './names.js';
import {about, chosen, table, versionOf} from './records.js';

/** By part: answers of `run`, of the runs that are looked at; each {data} or {error}. */
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

/** Sampled steps of all runs that are looked at, ascending. */
export const steps = computed(() => {
  const all = Object.values(details.value).flatMap(({data}) => data?.steps ?? []);
  return [...new Set(all)].sort((a, b) => a - b);
});

/** [first, last] of them, which the list of runs tells of operands before the steps between are read; null: not known yet. */
export const stepsFromTo = computed(() => {
  if (steps.value.length) return [steps.value[0], steps.value.at(-1)];
  const listed = Object.values(chosen.value).map(about).filter((run) => run && run.first !== null);
  if (table.value !== 'metrics' || !listed.length) return null;
  return [Math.min(...listed.map(({first}) => first)), Math.max(...listed.map(({last}) => last))];
});
