// Where each tensor stands on the map: layers of the model down, what is in them across.
import {computed} from '@preact/signals';
import {details} from '../records.js';
import {shown} from '../units.js';
import {keyOf} from './frames.js';

const ROLES = ['input', 'weight', 'grad_output'];

/** {rows, columns, cells, tensors}: names of both, [column, row, tensors] of each cell that has any, and all; of all runs. */
export const cells = computed(() => {
  const tensors = new Map();
  for (const {data} of Object.values(details.value)) {
    for (const [i, layer] of (data?.tensors.layer ?? []).entries()) {
      const {role, kind, depth} = data.tensors;
      tensors.set(keyOf(layer, role[i]), {layer, role: role[i], kind: kind[i], depth: depth[i]});
    }
  }
  const all = [...tensors.values()];
  const kinds = [...new Set(all.map((tensor) => tensor.kind))];
  const depths = [...new Set(all.map((tensor) => tensor.depth))].sort((a, b) => (a ?? Infinity) - (b ?? Infinity));
  const columns = kinds.flatMap((kind) => ROLES.map((role) => ({kind, role})).filter(({role}) => all.some((t) => t.kind === kind && t.role === role)));
  const columnOf = new Map(columns.map(({kind, role}, i) => [`${role} ${kind}`, i]));
  const rowOf = new Map(depths.map((depth, i) => [depth, i]));
  const found = new Map();
  for (const tensor of all) {
    const [column, row] = [columnOf.get(`${tensor.role} ${tensor.kind}`), rowOf.get(tensor.depth)];
    const place = row * columns.length + column;
    if (!found.has(place)) found.set(place, [column, row, []]);
    found.get(place)[2].push(tensor);
  }
  return {
    rows: depths.map((depth) => (depth === null ? 'outside' : String(depth))),
    columns: columns.map(({kind, role}) => `${kind} ${shown(role)}`),
    cells: [...found.values()],
    tensors: all,
  };
});
