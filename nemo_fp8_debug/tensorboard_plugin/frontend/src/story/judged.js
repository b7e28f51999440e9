// The verdict on the runs that are looked at: asked for once, for all views, and kept until it is asked for anew.
import {computed, effect, signal} from '@preact/signals';
import {about, chosen, known, versionOf} from '../records.js';
import {calm, watchJob} from '../server.js';

const times = signal(0);

/** {loading, seconds, partial}, then {data} or {error}. */
export const judged = signal({loading: true});

/** Whether it is worked on. */
export const isJudging = computed(() => isReadable.value && Boolean(judged.value.loading));

/** The versions of the records as they were when the verdict was asked for. */
const versions = signal('');

const names = computed(() => JSON.stringify([chosen.value.run, chosen.value.baseline, chosen.value.reference]));
const isReadable = computed(() => ['growing', 'ended', 'still'].includes(known.value && about(chosen.value.run)?.state));
const newest = computed(() => known.value && versionOf(...JSON.parse(names.value).filter(Boolean)));

const isKnown = (version) => Boolean(version) && version.split('/').every(Boolean);

effect(() => {
  void times.value;
  const [run, baseline, reference] = JSON.parse(names.value);
  judged.value = {loading: true};
  versions.value = '';
  return isReadable.value && run ? watchJob('verdict', {run, baseline, reference}, (told) => (judged.value = told), calm()) : undefined;
});

// Versions that were not known when it was asked for are those that come next.
effect(() => {
  if (!isKnown(versions.value) && isKnown(newest.value)) versions.value = newest.value;
});

/** Whether records have grown since: what is read does not change under the reader's eyes. */
export const hasGrown = computed(() => isKnown(versions.value) && isKnown(newest.value) && versions.value !== newest.value);

export const judgeAnew = () => (times.value += 1);

/** The story, as far as it is known; undefined: nothing is. */
export const story = computed(() => (judged.value.data ?? judged.value.partial)?.story);

/** What is known: none, loss, comparison, diagnosis or all. */
export const stage = computed(() => (judged.value.data ? 'all' : (judged.value.partial?.stage ?? 'none')));
