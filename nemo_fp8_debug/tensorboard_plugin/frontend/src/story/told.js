// What the story tells of one tensor.
import {story} from './judged.js';

/** Whether the tensors that matter are known by now. */
export const isTold = () => Boolean(story.value?.tensors);

/** What the story tells of a tensor; undefined: it is not among those that matter, or they are not known yet. */
export const storyOf = ({layer, role}) => story.value?.tensors?.find((row) => row.layer === layer && row.role === role);
