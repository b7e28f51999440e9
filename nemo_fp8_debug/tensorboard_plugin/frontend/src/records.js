// The runs under the logdir, asked for again while the tab is looked at, and which of them are looked at.
import {computed, effect, signal} from '@preact/signals';
import {at, go} from './address.js';
import {askAgain} from './kept.js';

const AGAIN_MS = 10_000;

/** Answer of `runs`; null before there is one. */
export const known = signal(null);
/** Why there is none; null otherwise. */
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

/** The parts that runs play, in the order of the page. */
export const PARTS = {
  run: {label: 'Run', hint: 'the run to look at'},
  baseline: {label: 'Baseline', hint: 'what the run is compared with'},
  reference: {label: 'Reference run', hint: 'the same run in BF16'},
};

/** Names of the runs by part: as the address has them, or as their names suggest. */
export const chosen = computed(() => {
  const names = new Set((known.value?.runs ?? []).map((run) => run.name));
  const pick = (part, guess) => (at(part) === undefined ? guess : names.has(at(part)) ? at(part) : undefined);
  const [baseline, reference, run] = ['baseline', 'reference', 'run'].map((part) => pick(part, known.value?.suggested[part] ?? undefined));
  return {run, baseline: baseline === run ? undefined : baseline, reference: reference === run || reference === baseline ? undefined : reference};
});

// A guess stays what it was, and is in the link, whatever runs appear later.
effect(() => {
  if (chosen.value.run && Object.keys(PARTS).some((part) => at(part) === undefined)) {
    const guessed = Object.keys(PARTS).filter((part) => at(part) === undefined);
    go(Object.fromEntries(guessed.map((part) => [part, chosen.value[part] ?? ''])));
  }
});

/** The name of the run that plays a part, and the part where the name does not say it. */
export function nameOf(part) {
  const [name, label] = [chosen.value[part], PARTS[part].label.toLowerCase()];
  return label.startsWith(name.toLowerCase()) ? name : `${name} (${label})`;
}

export const choose = (part, name) => go({[part]: name ?? ''}, true);

/** Let a run play a part; whoever played it takes over what the run was. */
export function exchange(part, name) {
  const was = Object.keys(PARTS).find((other) => chosen.value[other] === name);
  if (was !== part) go({...(was ? {[was]: chosen.value[part] ?? ''} : {}), [part]: name}, true);
}

/** What `runs` says of a run. */
export const about = (name) => (known.value?.runs ?? []).find((run) => run.name === name);

export const versionOf = (...names) => names.map((name) => about(name)?.version ?? '').join('/');

/** The tables of tensors, by what they hold. */
export const TABLES = {metrics: 'operands of GEMMs', states: 'optimizer states', activations: 'between GEMMs'};

/** The table that is looked at. */
export const table = computed(() => (at('table') in TABLES ? at('table') : 'metrics'));

/** Metrics that tensors of the table have that is looked at. */
export const metricsOfTable = () => known.value.metrics.filter((metric) => !metric.table || metric.table === table.value);

/** What there is to know of a metric: {name, label, unit, worse, scale}. */
export const metricNamed = (name) => (known.value?.metrics ?? []).find((metric) => metric.name === name);

const suggestion = signal({});

/** The metric by which a verdict found the first tensor out of the baseline's band; undefined: none, or not known. */
export const suggestedMetric = () => (suggestion.value.run === chosen.value.run && suggestion.value.baseline === chosen.value.baseline ? suggestion.value.metric : undefined);

/** Look at a metric as long as none is chosen. */
export function suggest(run, baseline, metric) {
  if (suggestion.value.run !== run || suggestion.value.baseline !== baseline || suggestion.value.metric !== metric) suggestion.value = {run, baseline, metric};
}
