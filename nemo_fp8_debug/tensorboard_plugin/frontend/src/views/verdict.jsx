// What is wrong with a run, what to change, and how the run differs from the baseline.
import '@preact/signals';
import {Notice, Problem} from '../components/basics.jsx';
import {chosen} from '../records.js';
import {judged, story} from '../story/judged.js';
import {Strip} from '../story/strip.jsx';
import {Tensors} from '../story/link.jsx';
import {Compared} from '../verdict/comparison.jsx';
import {Diagnosed} from '../verdict/diagnosis.jsx';
import {Recommended} from '../verdict/recommendation.jsx';

export function Verdict() {
  const {run, baseline, reference} = chosen.value;
  const {data, partial, error} = judged.value;
  if (error) return <Problem error={error} />;
  const told = story.value;
  const diagnosis = data?.diagnosis ?? partial?.diagnosis;
  return (
    <>
      {told?.events && <Strip events={told.events} rows={told.rows} unit={told.headline.unit} run={run} />}
      <div class="columns">
        <div>{told?.tensors && <Tensors tensors={told.tensors} unit={told.headline.unit} run={run} />}</div>
        <div>
          {diagnosis && <Diagnosed found={diagnosis} unit={told.headline.unit} run={run} />}
          {!baseline && diagnosis && <Alone run={run} />}
          {data && <Recommended found={data.recommendation} snippets={data.snippets} aboutFp8={data.diagnosis.about_fp8} run={run} />}
        </div>
      </div>
      {data?.comparison && (
        <details class="fold">
          <summary>Differences from {baseline}: losses, order, drift and settings in tables</summary>
          <Compared found={data.comparison} names={{baseline, run, reference}} />
        </details>
      )}
    </>
  );
}

const Alone = ({run}) => (
  <Notice title="Judged alone">
    <p>
      {run} was judged only by bands of healthy runs. Choose a baseline above to see when each tensor left its band, in which order,
      how far tensors drifted, and which settings differ. Choose a reference run that differs only in precision to see whether FP8 is
      the cause.
    </p>
  </Notice>
);
