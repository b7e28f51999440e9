// The scalars of the run above the map, and where something diverges.
import {chosen, PARTS, versionOf} from '../records.js';
import {useAnswers} from '../server.js';
import {aboutMetric} from '../timeline/metrics.jsx';

const SCALARS = ['loss', 'lr', 'grad_norm'];
/** Times the least that the largest is, from which on a logarithm is read better. */
const DECADES = 30;

/** By part, the losses of runs. */
export function useLosses() {
  const parts = Object.keys(PARTS).filter((part) => chosen.value[part]);
  const {data} = useAnswers(parts.map((part) => ['loss', {run: chosen.value[part]}, versionOf(chosen.value[part])]));
  return data ? Object.fromEntries(parts.map((part, i) => [part, data[i]])) : null;
}

/** [{name, label, log, lines: [{part, step, values}]}] of what was recorded, within a span of steps. */
export function linesOf(losses, [from, to]) {
  return SCALARS.map((name) => {
    const lines = Object.entries(losses).map(([part, data]) => lineOf(part, data.step, data[name], from, to)).filter(({step}) => step.length > 0);
    const values = lines.flatMap((line) => line.values);
    const [least, most] = [Math.min(...values), Math.max(...values)];
    return {name, label: aboutMetric(name).label, lines, log: least > 0 && most > DECADES * least};
  }).filter(({lines}) => lines.length > 0);
}

function lineOf(part, step, values, from, to) {
  const kept = step.flatMap((at, i) => (at >= from && at <= to && values[i] !== null ? [i] : []));
  return {part, step: kept.map((i) => step[i]), values: kept.map((i) => values[i])};
}
