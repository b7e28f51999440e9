// Small multiples: the tensors of each role, layers down in order of execution.
import {ROLES, shown} from '../units.js';

/** [{role, label, tensors: rows of the answer, names}] of the roles that there are. */
export function multiplesOf({layer, role, kind, depth}) {
  return ROLES.map((one) => {
    const tensors = layer.flatMap((_, i) => (role[i] === one ? [i] : []));
    return {role: one, label: shown(one), tensors, names: tensors.map((i) => (depth[i] === null ? layer[i] : `${depth[i]} ${kind[i]}`))};
  }).filter(({tensors}) => tensors.length > 0);
}

/** The tensors, the farthest first: {layer, role, value, number, step, since}. */
export function ranked({course, numbers, warmUp}, badness, counts) {
  const width = course.first.length;
  const rows = course.layer.map((layer, i) => {
    const row = {layer, role: course.role[i], value: NaN, number: NaN, step: null, since: null};
    let inRow = 0;
    for (let j = 0; j < width; j += 1) {
      const number = numbers[i * width + j];
      if (Number.isNaN(number) || course.first[j] <= warmUp) continue;
      if (Number.isNaN(row.number) || badness(number) > badness(row.number)) Object.assign(row, {value: course.values[i * width + j], number, step: course.first[j]});
      inRow = badness(number) > counts ? inRow + 1 : 0;
      if (inRow === IN_A_ROW && row.since === null) row.since = course.first[j - IN_A_ROW + 1];
    }
    return row;
  });
  return rows.filter((row) => !Number.isNaN(row.number)).sort((a, b) => badness(b.number) - badness(a.number));
}

const IN_A_ROW = 3;
