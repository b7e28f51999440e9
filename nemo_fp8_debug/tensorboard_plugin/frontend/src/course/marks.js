// Where the loss of the run diverges from the baseline's, and where the first tensor does: what the verdict says.
import {useEffect} from 'preact/hooks';
import {chosen, suggest} from '../records.js';
import {judged} from '../story/judged.js';
import {titleOf} from '../units.js';

/** @returns {Array<{step, label, kind}>} as far as it is known by now */
export function useMarks() {
  const {run, baseline} = chosen.value;
  const comparison = (judged.value.data ?? judged.value.partial)?.comparison;
  const first = comparison?.out_of_band[0];
  useEffect(() => {
    if (first) suggest(run, baseline, first.metric);
  }, [first]);
  if (!comparison) return [];
  const since = comparison.runs.run.above_baseline_since;
  return [
    ...(since == null ? [] : [{step: since, kind: 'loss', label: `loss diverges at ${since}`}]),
    ...(first ? [{step: first.onset, kind: 'tensor', label: `${titleOf(first)} at ${first.onset}`}] : []),
  ];
}
