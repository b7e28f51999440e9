// Tensors that samples of a run have and its newest one lacks, as experts that got no token.
import {signal} from '@preact/signals';

export const keyOf = (layer, role) => `${role} ${layer}`;

/** By run, by key: {layer, role, kind, depth}. */
export const met = signal(new Map());
const seen = new WeakSet();

const keys = new WeakMap();

function keysOf(tensors) {
  if (!keys.has(tensors)) keys.set(tensors, new Set(tensors.layer.map((layer, i) => keyOf(layer, tensors.role[i]))));
  return keys.get(tensors);
}

/**
 * Take in the tensors of a run's chunk.
 * @param {{layer: string[], role: string[]}} tensors that the newest sample has
 */
export function meet(run, chunk, tensors) {
  if (!chunk || seen.has(chunk)) return;
  seen.add(chunk);
  const newest = keysOf(tensors);
  const before = met.value.get(run) ?? new Map();
  const more = new Map(before);
  for (const [i, layer] of chunk.layer.entries()) {
    const role = chunk.role[i];
    if (!newest.has(keyOf(layer, role))) more.set(keyOf(layer, role), {layer, role, kind: chunk.kind[i], depth: chunk.depth[i]});
  }
  if (more.size > before.size) met.value = new Map([...met.value, [run, more]]);
}
