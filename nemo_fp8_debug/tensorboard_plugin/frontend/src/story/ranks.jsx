// Of how many ranks a tensor's values are, and where some were missing.
import {step as chosenStep} from '../address.js';
import {chosen, versionOf} from '../records.js';
import {useAnswer} from '../server.js';
import {placeOf} from '../units.js';

/** {step, ranks, missing}: columns of the run; undefined where nothing is known. */
export function useRanks(tensor) {
  const {run} = chosen.value;
  const {data} = useAnswer('timeline', {run, ...tensor, metrics: 'ranks,ranks_missing'}, versionOf(run));
  return data && {step: data.step, ranks: data.metrics.ranks, missing: data.metrics.ranks_missing};
}

/** Steps at which ranks were missing. */
export const stepsMissing = (of) => of?.step.filter((_, i) => of.missing[i] > 0) ?? [];

/** @param {string} layer of whose experts as one the parts are counted, of each expert on each rank @param {object} of as of `useRanks` */
export function Ranks({layer, of}) {
  const at = of && (chosenStep.value === null ? of.step.length - 1 : placeOf(of.step, chosenStep.value));
  if (of?.ranks[at] == null) return null;
  const [there, missing, lacking] = [of.ranks[at], of.missing[at] ?? 0, stepsMissing(of).length];
  return (
    <p class="soft" data-words="ranks">
      {layer.split('.').includes('*') ? 'parts of experts' : 'ranks'}: {there}{missing > 0 && <> of {there + missing}; <b class="blamed">{missing} missing</b></>}
      {lacking > 0 && ` at step ${of.step[at]} (some are missing at ${lacking} of ${of.step.length} samples)`}
    </p>
  );
}
