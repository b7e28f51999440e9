// The scalars of the runs above the map.
import {axisOf} from '../timeline/axes.js';
import {aboutMetric} from '../timeline/metrics.jsx';
import {recorded} from '../timeline/panels.js';

const SCALARS = ['loss', 'lr', 'grad_norm'];

/**
 * What was recorded of the runs within a span of steps.
 * @param {object} losses by key of `shownRuns`, answers of `loss`
 * @returns {Array<{name, label, unit, log, limits, left, lines: Array<{part, step: number[], values: Array<?number>}>}>}
 */
export function linesOf(losses, span) {
  return SCALARS.map((name) => {
    const lines = Object.entries(losses).map(([part, data]) => ({part, ...within(recorded(data, name), span)})).filter(({values}) => values.some((value) => value !== null));
    const {label, unit} = aboutMetric(name);
    return {name, label, unit, lines, ...axisOf('', true, lines)};
  }).filter(({lines}) => lines.length > 0);
}

function within({step, values}, [from, to]) {
  const kept = step.flatMap((at, i) => (at >= from && at <= to ? [i] : []));
  return {step: kept.map((i) => step[i]), values: kept.map((i) => values[i])};
}
