// The tensor that a view begins with as long as none is chosen.
import {computed} from '@preact/signals';
import {details} from '../details.js';
import {story} from './judged.js';

/** {layer, role} of the first tensor of the story, if it is among the run's that are looked at; null: none, or not known yet. */
export const firstTensor = computed(() => {
  const first = story.value?.headline.first;
  const tensors = details.value.run?.data?.tensors;
  const isThere = first && tensors?.layer.some((layer, i) => layer === first.layer && tensors.role[i] === first.role);
  return isThere ? {layer: first.layer, role: first.role} : null;
});
