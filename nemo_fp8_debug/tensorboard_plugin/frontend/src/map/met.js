// Tensors that samples of a run have and its newest one lacks, as experts that got no token.
import {signal} from '@preact/signals';

export const keyOf = (layer, role) => `${role} ${layer}`;

/** By run, by key: {layer, role, kind, depth}. */
export const met = signal(new Map());
const seen = new WeakSet();

/** Take in the tensors of a run's chunk. */
export function meet(run, chunk) {
  if (!chunk || seen.has(chunk)) return;
  seen.add(chunk);
  const before = met.value.get(run) ?? new Map();
  const more = new Map(before);
  for (const [i, layer] of chunk.layer.entries()) {
    const role = chunk.role[i];
    more.set(keyOf(layer, role), {layer, role, kind: chunk.kind[i], depth: chunk.depth[i]});
  }
  if (more.size > before.size) met.value = new Map([...met.value, [run, more]]);
}
