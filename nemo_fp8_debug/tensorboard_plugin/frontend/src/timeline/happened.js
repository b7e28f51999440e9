// Events of the runs and of the tensor, by step.
import {metricNamed} from '../records.js';
import {placeOf, withUnit} from '../units.js';

export const KINDS = {
  diverges: {label: 'loss departs or diverges'},
  leaves: {label: "leaves the baseline's band"},
  spike: {label: 'spike of the loss', why: 'more than 5 standard deviations above the running median', symbol: 'triangle'},
  skipped: {label: 'skipped step', why: 'the optimizer did not step', symbol: 'rect'},
  trigger: {label: 'triggered sample', symbol: 'diamond'},
  change: {label: 'cast differently', symbol: 'circle'},
};

/** Return the last known value at or before a step, or null. */
function valueAt(step, values, wanted) {
  let place = placeOf(step, wanted);
  while (place > 0 && values[place] === null) place -= 1;
  return values[place] ?? null;
}

/**
 * Return [step, new cast] for each sampled step at which a tensor is cast in another way than at the previous sampled step.
 */
function changesOf(sample) {
  const how = sample?.step.map((_, i) => `${sample.format[i]} under ${sample.recipe[i]}, scale: ${sample.scale_source[i]}`) ?? [];
  return how.flatMap((now, i) => (i > 0 && now !== how[i - 1] ? [[sample.step[i], now]] : []));
}

/** Return a sentence about a metric that leaves its band. */
export function leavingTold(name, {usual, value}) {
  const {label, unit} = metricNamed(name) ?? {label: name, unit: ''};
  return `${label} ${withUnit(usual, unit)} in the baseline, ${withUnit(value, unit)} here`;
}

/** @returns {Array<{part, step, kind, why}>} */
function apart(divergence, band, hasBaseline) {
  const why = hasBaseline ? "a test finds it above the baseline's loss from here on" : 'it rises for good from here on';
  const of = (kind, step, told) => ({part: 'run', step, kind, why: told, loss: null});
  const left = Object.entries(band?.metrics ?? {}).filter(([, {since}]) => since !== null);
  return [
    ...(divergence?.since == null ? [] : [of('diverges', divergence.since, why)]),
    ...left.map(([name, metric]) => of('leaves', metric.since, leavingTold(name, metric))),
  ];
}

/** Return all events, ascending by step: [{part, step, kind, why, loss}]. An unknown loss is null. */
export function eventsOf({samples, losses, divergence, band, hasBaseline}) {
  const events = Object.entries(losses).flatMap(([part, data]) => {
    const of = (kind, step, why = KINDS[kind].why) => ({part, step, kind, why, loss: data ? valueAt(data.step, data.loss, step) : null});
    return [
      ...changesOf(samples[part]).map(([step, why]) => of('change', step, why)),
      ...(data?.spikes ?? []).map((step) => of('spike', step)),
      ...(data?.skipped ?? []).map((step) => of('skipped', step)),
      ...(data?.triggers ?? []).map(([step, why]) => of('trigger', step, why)),
    ];
  });
  return [...apart(divergence, band, hasBaseline), ...events].sort((a, b) => a.step - b.step);
}

/** Return the steps to mark by vertical lines, with labels: where the loss and the tensor depart, and the selected step. */
export function markersOf({divergence, band, step, hasBaseline}) {
  return [
    divergence?.since != null && {kind: 'diverges', step: divergence.since, label: `loss ${hasBaseline ? 'departs' : 'diverges'}: step ${divergence.since}`},
    band?.since != null && {kind: 'leaves', step: band.since, label: `leaves the band${band.chance ? ' (may be chance)' : ''}: step ${band.since}`},
    step !== null && {kind: 'chosen', step, label: `step ${step}`},
  ].filter(Boolean);
}
