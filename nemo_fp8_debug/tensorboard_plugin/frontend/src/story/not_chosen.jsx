// Which tensor a view shows as long as none is chosen.
import '@preact/signals';
import {Notice} from '../components/notice.jsx';
import {titleOf} from '../units.js';
import {judged} from './judged.js';

/** @param {?{layer, role}} first as of `firstTensor` */
export function NotChosen({first}) {
  if (first) return <p class="soft" role="status">No tensor is chosen: here is {titleOf(first)}, the first that the verdict names.</p>;
  if (judged.value.loading) return <p class="soft" role="status">No tensor is chosen: the first that the verdict names follows as soon as it is known.</p>;
  return <Notice title="No tensor chosen"><p>Type a part of a layer's name above and choose a tensor, or click a cell of the map.</p></Notice>;
}
