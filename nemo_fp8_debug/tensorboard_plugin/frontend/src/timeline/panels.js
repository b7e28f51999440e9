// What the charts over the steps show.
import {placeOf} from '../units.js';
import {axisOf} from './axes.js';
import {aboutMetric, ofTheRun} from './metrics.jsx';

/**
 * @param {string[]} metrics in the order of the charts
 * @param {object} samples by key of `shownRuns`, answers of `timeline`
 * @param {object} losses by key, answers of `loss`
 * @param {?object} band answer of `band`
 * @param {string} axes key of AXES
 * @returns {Array<{name, label, unit, ofRun, log, limits, left, band, lines: Array<{part, step: number[], values: Array<?number>}>}>}
 *   those of the run, as the loss, before those of the tensor
 */
export function panelsOf(metrics, samples, losses, band, axes) {
  return metrics
    .map((name) => {
      const {label, unit, scale, optional} = aboutMetric(name);
      const ofRun = ofTheRun(name);
      const lines = Object.entries(ofRun ? losses : samples)
        .map(([part, data]) => ({part, ...(ofRun ? recorded(data, name) : {step: data?.step, values: data?.metrics?.[name]})}))
        .filter(({values}) => values?.some((value) => value !== null));
      return {name, label, unit, ofRun, optional, lines, band: band?.metrics[name] ?? null, ...axisOf(axes, ofRun || scale === 'log', lines)};
    })
    .filter(({lines, optional}) => lines.length || !optional);
}

/** A line of the steps at which something was recorded: broken where it is NaN or infinite, and nowhere else. */
export function recorded(data, name) {
  const lost = new Set(data?.not_finite[name]);
  const places = (data?.[name] ?? []).flatMap((value, i) => (value === null && !lost.has(data.step[i]) ? [] : [i]));
  return {step: places.map((i) => data.step[i]), values: places.map((i) => data[name][i])};
}

/** [first, last] step of all lines. */
export function extent(panels) {
  const steps = panels.flatMap(({lines}) => lines.flatMap(({step}) => [step[0], step[step.length - 1]]));
  return steps.length ? [Math.min(...steps), Math.max(...steps)] : [0, 1];
}

/** By part the value of each line at the step next to one: {step, value}. */
export function valuesAt({lines}, wanted) {
  return Object.fromEntries(lines.map(({part, step, values}) => {
    const place = placeOf(step, wanted);
    return [part, {step: step[place], value: values[place]}];
  }));
}

/** {low, expected, high} of a panel's band at the step next to one; null outside of what the baseline covers. */
export function bandAt({band}, wanted) {
  if (!band?.step.length || wanted < band.step[0] || wanted > band.step[band.step.length - 1]) return null;
  const place = placeOf(band.step, wanted);
  return {low: band.low[place], expected: band.expected[place], high: band.high[place]};
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
