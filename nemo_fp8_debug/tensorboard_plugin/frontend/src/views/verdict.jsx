// What is wrong with a run, what to change, and what sets it apart from a baseline.
import {useEffect, useRef, useState} from 'preact/hooks';
import {Notice, Problem} from '../components/notice.jsx';
import {chosen, versionOf} from '../records.js';
import {useJob} from '../server.js';
import {story} from '../story/told.js';
import {Compared} from '../verdict/comparison.jsx';
import {Diagnosed} from '../verdict/diagnosis.jsx';
import {Recommended} from '../verdict/recommendation.jsx';

export function Verdict() {
  const {run, baseline, reference} = chosen.value;
  return <VerdictOf key={JSON.stringify([run, baseline, reference])} run={run} baseline={baseline} reference={reference} />;
}

const known = (version) => version.split('/').every(Boolean);

/** Of the records as they were when it was asked for: what is read does not change under the reader's eyes. */
function VerdictOf({run, baseline, reference}) {
  const newest = versionOf(...[run, baseline, reference].filter(Boolean));
  const judged = useRef(newest);
  if (!known(judged.current)) judged.current = newest;
  const [times, again] = useState(0);
  const job = useJob('verdict', {run, baseline, reference}, String(times));
  useEffect(() => void (story.value = job.data?.story ?? null), [job.data]);
  const anew = () => {
    judged.current = newest;
    again(times + 1);
  };
  if (job.error) return <><Problem error={job.error} /><button type="button" onClick={anew}>Try again</button></>;
  if (!job.data) return <Working seconds={job.seconds} run={run} baseline={baseline} reference={reference} />;
  return (
    <>
      {judged.current !== newest && (
        <p class="soft" role="status">
          The records have grown since. <button type="button" onClick={anew}>Judge them anew</button>
        </p>
      )}
      <Diagnosed found={job.data.diagnosis} unit={job.data.comparison?.unit ?? 'step'} run={run} />
      {!baseline && <Alone run={run} />}
      <Recommended found={job.data.recommendation} snippets={job.data.snippets} aboutFp8={job.data.diagnosis.about_fp8} run={run} />
      {job.data.comparison && <Compared found={job.data.comparison} names={{baseline, run, reference}} />}
    </>
  );
}

function Working({seconds, run, baseline, reference}) {
  const against = baseline ? `${run} is compared with ${baseline}${reference ? ` and its reference run ${reference}` : ''}, and diagnosed` : `${run} is diagnosed`;
  return <p class="soft" role="status">{against}; changes are tried. {seconds ? `For ${Math.round(seconds)} s so far …` : '…'}</p>;
}

const Alone = ({run}) => (
  <Notice title="Judged alone">
    <p>
      {run} was compared with its own beginning only. With a baseline, chosen above, there is more: since when each tensor is out of
      the baseline's band, in which order they left, how far they drifted, and in what the settings differ. With a reference run that
      differs in precision alone, whether FP8 is the cause at all.
    </p>
  </Notice>
);
