// The story of the runs that are looked at, as the verdict tells it; whoever has the verdict puts it here.
import {signal} from '@preact/signals';

/** {tensors: [...], events: [...], headline: {...}}; null: not known yet. */
export const story = signal(null);

/** What the story tells of a tensor; undefined: it is not among those that matter. */
export const storyOf = ({layer, role}) => story.value?.tensors.find((row) => row.layer === layer && row.role === role);
