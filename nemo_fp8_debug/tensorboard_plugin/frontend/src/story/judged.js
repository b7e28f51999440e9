// The verdict on the selected runs, requested once for all views, and what it says about a tensor.
import {computed, effect, signal} from '@preact/signals';
import {details} from '../details.js';
import {about, chosen, known, metricNamed, versionOf} from '../records.js';
import {calm, useAnswer, watchJob} from '../server.js';
import {withUnit} from '../units.js';

const times = signal(0);

/** The state of the verdict: {loading, seconds, partial}, then {data} or {error}. */
export const judged = signal({loading: true});

/** Whether the verdict is being computed. */
export const isJudging = computed(() => isReadable.value && Boolean(judged.value.loading));

/** The versions of the records when the verdict was requested. */
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

// If the versions were unknown when the verdict was requested, store the first known versions.
effect(() => {
  if (!isKnown(versions.value) && isKnown(newest.value)) versions.value = newest.value;
});

/**
 * Whether records have grown since the request. The verdict then stays, so that it does not change while the user reads it.
 */
export const hasGrown = computed(() => isKnown(versions.value) && isKnown(newest.value) && versions.value !== newest.value);

export const judgeAnew = () => (times.value += 1);

/** The story as far as it is known, or undefined if nothing is known. */
export const story = computed(() => (judged.value.data ?? judged.value.partial)?.story);

/** How much of the verdict is known: none, loss, comparison, diagnosis or all. */
export const stage = computed(() => (judged.value.data ? 'all' : (judged.value.partial?.stage ?? 'none')));

// The tensor that a view shows while no tensor is selected.
/**
 * {layer, role} of the story's first tensor, if the selected run's table contains it. Null if it does not, or if it is
 * unknown.
 */
export const firstTensor = computed(() => {
  const first = story.value?.headline.first;
  const tensors = details.value.run?.data?.tensors;
  const isThere = first && tensors?.layer.some((layer, i) => layer === first.layer && tensors.role[i] === first.role);
  return isThere ? {layer: first.layer, role: first.role} : null;
});

// What the story says about one tensor.
/** Return whether the tensors that matter are known. */
export const isTold = () => Boolean(story.value?.tensors);

/** Return the story's row of a tensor, or undefined if the tensor does not matter or the story is unknown. */
export const storyOf = ({layer, role}) => story.value?.tensors?.find((row) => row.layer === layer && row.role === role);

// The baseline's band of a tensor, the step at which the tensor left it, and the step at which the loss departs.
/** Return the answer of `band`. Without a baseline or a tensor, data is null. */
export function useBand(tensor) {
  const {run, baseline} = chosen.value;
  const asked = tensor && run && baseline;
  return useAnswer(asked ? 'band' : null, {run, baseline, ...tensor}, versionOf(run, baseline));
}

/** Return the answer of `divergence`. */
export function useDivergence() {
  const {run, baseline} = chosen.value;
  return useAnswer(run ? 'divergence' : null, {run, baseline}, versionOf(run, baseline));
}

// Sentences about a tensor.
const apart = (step, other) => {
  const by = Math.abs(step - other);
  return by === 0 ? 'with the loss' : `${by} step${by === 1 ? '' : 's'} ${step < other ? 'before' : 'after'} the loss`;
};

/**
 * Return a sentence: whether a tensor stays in the baseline's band, or since when it is out of it.
 * @param {?object} band answer of `band`
 * @param {?object} divergence answer of `divergence`
 * @param {string} baseline name of the baseline
 */
export function whetherInBand(band, divergence, baseline) {
  if (!band) return '';
  if (band.why) return band.why;
  if (band.since === null) return within(band, baseline);
  const {label, unit} = metricNamed(band.metric);
  const {usual, value} = band.metrics[band.metric];
  const lead = divergence?.since == null ? '' : `, ${apart(band.since, divergence.since)}`;
  const chance = band.chance ? ' Chance alone may explain this among so many tensors.' : '';
  return `Out of the band of ${baseline} since step ${band.since}${lead}: ${label} ${withUnit(usual, unit)} → ${withUnit(value, unit)}.${chance}`;
}

function within({metrics}, baseline) {
  const [name, most] = Object.entries(metrics).reduce((found, one) => (one[1].beyond > found[1].beyond ? one : found));
  if (!most.beyond) return `Within the band of ${baseline} at every sample.`;
  const why = most.counted ? 'too few in a row to count' : "its MSE is not above the baseline's, so this does not count";
  return `Within the band of ${baseline}, except for ${most.beyond} sample${most.beyond === 1 ? '' : 's'} of ${metricNamed(name).label}: ${why}.`;
}

/**
 * Return why a tensor is blamed or not.
 * @param {?object} row the story's row of the tensor
 * @param {boolean} known whether the story is known
 */
export function whyTold(row, known) {
  if (row) return row.why;
  return known ? 'This tensor is not among those that matter.' : 'The verdict is not known yet.';
}
