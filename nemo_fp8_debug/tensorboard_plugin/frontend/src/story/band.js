// The baseline's band of a tensor, since when the tensor is out of it, and since when the loss diverges.
import {chosen, versionOf} from '../records.js';
import {useAnswer} from '../server.js';

/** The answer of `band`; data null where there is no baseline, or no tensor. */
export function useBand(tensor) {
  const {run, baseline} = chosen.value;
  const asked = tensor && run && baseline;
  return useAnswer(asked ? 'band' : null, {run, baseline, ...tensor}, versionOf(run, baseline));
}

/** The answer of `divergence`. */
export function useDivergence() {
  const {run, baseline} = chosen.value;
  return useAnswer(run ? 'divergence' : null, {run, baseline}, versionOf(run, baseline));
}
