// The verdict on the runs that are looked at, asked for once for all views, and what it says of a tensor.
import {computed, effect, signal} from '@preact/signals';
import {details} from '../details.js';
import {about, chosen, known, metricNamed, versionOf} from '../records.js';
import {calm, useAnswer, watchJob} from '../server.js';
import {withUnit} from '../units.js';

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

// The tensor that a view begins with as long as none is chosen.
/** {layer, role} of the first tensor of the story, if it is among the run's that are looked at; null: none, or not known yet. */
export const firstTensor = computed(() => {
  const first = story.value?.headline.first;
  const tensors = details.value.run?.data?.tensors;
  const isThere = first && tensors?.layer.some((layer, i) => layer === first.layer && tensors.role[i] === first.role);
  return isThere ? {layer: first.layer, role: first.role} : null;
});

// What the story tells of one tensor.
/** Whether the tensors that matter are known by now. */
export const isTold = () => Boolean(story.value?.tensors);

/** What the story tells of a tensor; undefined: it is not among those that matter, or they are not known yet. */
export const storyOf = ({layer, role}) => story.value?.tensors?.find((row) => row.layer === layer && row.role === role);

// The baseline's band of a tensor, since when the tensor is out of it, and since when the loss departs.
/** The answer of `band`; data null where there is no baseline, or no tensor. */
export function useBand(tensor) {
  const {run, baseline} = chosen.value;
  const asked = tensor && run && baseline;
  return useAnswer(asked ? 'band' : null, {run, baseline, ...tensor}, versionOf(run, baseline));
}

/** The answer of `divergence`. */
export function useDivergence() {
  const {run, baseline} = chosen.value;
  return useAnswer(run ? 'divergence' : null, {run, baseline}, versionOf(run, baseline));
}

// What there is to say of a tensor in sentences.
const apart = (step, other) => {
  const by = Math.abs(step - other);
  return by === 0 ? 'with the loss' : `${by} step${by === 1 ? '' : 's'} ${step < other ? 'before' : 'after'} the loss`;
};

/**
 * Whether a tensor is in the baseline's band, and since when not.
 * @param {?object} band answer of `band`
 * @param {?object} divergence answer of `divergence`
 * @param {string} baseline its name
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

/** Why a tensor is blamed or is not. @param {?object} row what the story tells of it @param {boolean} known whether there is a story */
export function whyTold(row, known) {
  if (row) return row.why;
  return known ? 'This tensor is not among those that matter.' : 'The verdict is not known yet.';
}
