// The runs under the logdir, updated while the tab is visible, and the selected runs.
import {computed, effect, signal} from '@preact/signals';
import {at, go} from './address.js';
import {askAgain} from './kept.js';

const AGAIN_MS = 10_000;

/** The answer of `runs`, or null before the first answer. */
export const known = signal(null);
/** The reason why the last request failed, or null. */
export const unreachable = signal(null);

export async function look() {
  try {
    const answer = await askAgain('runs');
    if (JSON.stringify(answer) !== JSON.stringify(known.value)) known.value = answer;
    unreachable.value = null;
  } catch (error) {
    unreachable.value = error.message;
  }
}

export function keepLooking() {
  look();
  const timer = setInterval(() => document.visibilityState === 'visible' && look(), AGAIN_MS);
  return () => clearInterval(timer);
}

/** The parts that a run can play in a comparison, in the order of the page. */
export const PARTS = {
  run: {label: 'Run', hint: 'the run to look at'},
  baseline: {label: 'Baseline', hint: 'what the run is compared with'},
  reference: {label: 'Reference run', hint: 'the same run in BF16'},
};

/** Names of the selected runs by part, from the address, or else suggested by the names of runs. */
export const chosen = computed(() => {
  const names = new Set((known.value?.runs ?? []).map((run) => run.name));
  const pick = (part, guess) => (at(part) === undefined ? guess : names.has(at(part)) ? at(part) : undefined);
  const [baseline, reference, run] = ['baseline', 'reference', 'run'].map((part) => pick(part, known.value?.suggested[part] ?? undefined));
  return {run, baseline: baseline === run ? undefined : baseline, reference: reference === run || reference === baseline ? undefined : reference};
});

// Write suggested runs to the address, so that they stay the same in links and if other runs appear later.
effect(() => {
  if (chosen.value.run && Object.keys(PARTS).some((part) => at(part) === undefined)) {
    const guessed = Object.keys(PARTS).filter((part) => at(part) === undefined);
    go(Object.fromEntries(guessed.map((part) => [part, chosen.value[part] ?? ''])));
  }
});

/** Return the name of the run that plays a part, followed by the part if the name does not show it. */
export function nameOf(part) {
  const [name, label] = [chosen.value[part], PARTS[part].label.toLowerCase()];
  return label.startsWith(name.toLowerCase()) ? name : `${name} (${label})`;
}

export const choose = (part, name) => go({[part]: name ?? ''}, true);

/** Let a run play a part. The run that played this part before gets the other run's part. */
export function exchange(part, name) {
  const was = Object.keys(PARTS).find((other) => chosen.value[other] === name);
  if (was !== part) go({...(was ? {[was]: chosen.value[part] ?? ''} : {}), [part]: name}, true);
}

/** Return the description of a run in `runs`. */
export const about = (name) => (known.value?.runs ?? []).find((run) => run.name === name);

export const versionOf = (...names) => names.map((name) => about(name)?.version ?? '').join('/');

/** The tables of tensors, and what they contain. */
export const TABLES = {metrics: 'operands of GEMMs', states: 'optimizer states', activations: 'between GEMMs'};

/** The selected table. */
export const table = computed(() => (at('table') in TABLES ? at('table') : 'metrics'));

/** Return the metrics of tensors in the selected table. */
export const metricsOfTable = () => known.value.metrics.filter((metric) => !metric.table || metric.table === table.value);

/** Return the description of a metric: {name, label, unit, worse, scale}. */
export const metricNamed = (name) => (known.value?.metrics ?? []).find((metric) => metric.name === name);

const suggestion = signal({});

/**
 * Return the metric by which the verdict's first tensor left the baseline's band, or undefined without such a tensor or if it is
 * unknown.
 */
export const suggestedMetric = () => (suggestion.value.run === chosen.value.run && suggestion.value.baseline === chosen.value.baseline ? suggestion.value.metric : undefined);

/** Set the metric to show while no metric is selected. */
export function suggest(run, baseline, metric) {
  if (suggestion.value.run !== run || suggestion.value.baseline !== baseline || suggestion.value.metric !== metric) suggestion.value = {run, baseline, metric};
}
