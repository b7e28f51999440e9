// What the charts over the steps show, and what happened in which step.
import {placeOf} from '../units.js';
import {aboutMetric, ofTheRun} from './metrics.jsx';

/**
 * @param {string[]} metrics
 * @param {object} samples by part, answers of `timeline`
 * @param {object} losses by part, answers of `loss`
 * @returns {Array<{name, label, unit, log: boolean, lines: Array<{part, step: number[], values: Array<?number>}>}>} the loss last
 */
export function panelsOf(metrics, samples, losses) {
  return [...metrics, 'loss'].map((name) => {
    const {label, unit, scale, sparse} = aboutMetric(name);
    const lines = Object.entries(ofTheRun(name) ? losses : samples)
      .map(([part, data]) => ({part, step: data?.step, values: ofTheRun(name) ? data?.[name] : data?.metrics?.[name]}))
      .filter(({values}) => values?.some((value) => value !== null))
      .map((line) => (sparse ? known(line) : line));
    const positive = lines.every(({values}) => values.every((value) => value === null || value > 0));
    return {name, label, unit, lines, log: scale === 'log' && lines.length > 0 && positive};
  });
}

/** A line of the steps that have a value. */
function known({part, step, values}) {
  const places = values.flatMap((value, i) => (value === null ? [] : [i]));
  return {part, step: places.map((i) => step[i]), values: places.map((i) => values[i])};
}

/** [first, last] step of all lines. */
export function extent(panels) {
  const steps = panels.flatMap(({lines}) => lines.flatMap(({step}) => [step[0], step[step.length - 1]]));
  return steps.length ? [Math.min(...steps), Math.max(...steps)] : [0, 1];
}

/** The last value that is there at a step or before. */
function valueAt(step, values, wanted) {
  let place = placeOf(step, wanted);
  while (place > 0 && values[place] === null) place -= 1;
  return values[place] ?? null;
}

export const KINDS = {
  spike: {label: 'spike of the loss', why: 'more than 5 standard deviations above the running median', symbol: 'triangle'},
  skipped: {label: 'skipped step', why: 'the optimizer did not step', symbol: 'rect'},
  trigger: {label: 'triggered sample', symbol: 'diamond'},
  change: {label: 'cast differently', symbol: 'circle'},
};

/** [step, how from then on] where a tensor is cast otherwise than at the sampled step before. */
function changesOf(sample) {
  const how = sample?.step.map((_, i) => `${sample.format[i]} under ${sample.recipe[i]}, scale: ${sample.scale_source[i]}`) ?? [];
  return how.flatMap((now, i) => (i > 0 && now !== how[i - 1] ? [[sample.step[i], now]] : []));
}

/** What happened, ascending by step: [{part, step, kind, why, loss}]; the loss null where none is known. */
export function eventsOf(samples, losses) {
  const events = Object.entries(losses).flatMap(([part, data]) => {
    const of = (kind, step, why = KINDS[kind].why) => ({part, step, kind, why, loss: data ? valueAt(data.step, data.loss, step) : null});
    return [
      ...changesOf(samples[part]).map(([step, why]) => of('change', step, why)),
      ...(data?.spikes ?? []).map((step) => of('spike', step)),
      ...(data?.skipped ?? []).map((step) => of('skipped', step)),
      ...(data?.triggers ?? []).map(([step, why]) => of('trigger', step, why)),
    ];
  });
  return events.sort((a, b) => a.step - b.step);
}

/** Steps beside metrics, in rows of a table: headings, then all runs one after the other. */
export function tableOf(panels, names) {
  const parts = [...new Set(panels.flatMap(({lines}) => lines.map(({part}) => part)))];
  const rows = parts.flatMap((part) => {
    const columns = panels.map(({lines}) => lines.find((line) => line.part === part));
    const values = columns.map((line) => new Map(line?.step.map((step, i) => [step, line.values[i]])));
    const steps = [...new Set(columns.flatMap((line) => line?.step ?? []))].sort((a, b) => a - b);
    return steps.map((step) => [names[part], step, ...values.map((of) => of.get(step) ?? null)]);
  });
  return [['run', 'step', ...panels.map(({name}) => name)], ...rows];
}
