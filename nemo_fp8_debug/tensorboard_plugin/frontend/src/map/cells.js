// Where each tensor stands on the map: layers of the model down, what is in them across.
import {computed} from '@preact/signals';
import {details} from '../details.js';
import {chosen, table} from '../records.js';
import {ROLES, shown} from '../units.js';
import {keyOf, met} from './met.js';

/** {named, rows, columns, groups, cells, tensors}: whether rows are names of layers, names of both, which columns are of one kind of GEMM, [column, row, tensors] of each cell that has any, and all; of all runs. */
export const cells = computed(() => {
  const all = [...tensorsOfAll().values()];
  // Layers that have no number stand one under the other by their names.
  const named = all.every(({depth}) => depth === null);
  const placed = all.map((tensor) => (named ? {tensor, row: tensor.layer, group: ''} : {tensor, row: tensor.depth, group: tensor.kind}));
  const rows = [...new Set(placed.map(({row}) => row))];
  if (!named) rows.sort((a, b) => (a ?? Infinity) - (b ?? Infinity));
  const groups = [...new Set(placed.map(({group}) => group))];
  const there = new Set(placed.map(({tensor, group}) => keyOf(group, tensor.role)));
  const columns = groups.flatMap((group) => ROLES.map((role) => ({group, role})).filter(({role}) => there.has(keyOf(group, role))));
  const columnOf = new Map(columns.map(({group, role}, i) => [keyOf(group, role), i]));
  const rowOf = new Map(rows.map((row, i) => [row, i]));
  const found = new Map();
  for (const {tensor, row, group} of placed) {
    const [x, y] = [columnOf.get(keyOf(group, tensor.role)), rowOf.get(row)];
    const place = y * columns.length + x;
    if (!found.has(place)) found.set(place, [x, y, []]);
    found.get(place)[2].push(tensor);
  }
  return {
    named,
    rows: rows.map((row) => (row === null ? 'outside' : String(row))),
    columns: columns.map(({role}) => shown(role)),
    groups: groups.map((group) => ({label: group, from: columns.findIndex((one) => one.group === group), count: columns.filter((one) => one.group === group).length})),
    cells: [...found.values()],
    tensors: all,
  };
});

function tensorsOfAll() {
  const tensors = new Map();
  for (const {data} of Object.values(details.value)) {
    for (const [i, layer] of (data?.tensors.layer ?? []).entries()) {
      const {role, kind, depth} = data.tensors;
      tensors.set(keyOf(layer, role[i]), {layer, role: role[i], kind: kind[i], depth: depth[i]});
    }
  }
  for (const run of Object.values(chosen.value)) for (const [key, tensor] of met.value.get(`${table.value} ${run}`) ?? []) if (!tensors.has(key)) tensors.set(key, tensor);
  return tensors;
}
