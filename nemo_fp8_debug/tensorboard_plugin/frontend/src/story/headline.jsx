// The verdict in a few lines above every view: what happened, since when, why, how sure we are, and what to change.
import '@preact/signals';
import {useRef, useState} from 'preact/hooks';
import {at} from '../address.js';
import {Copy, Link, Sentence} from '../components/basics.jsx';
import {Help} from '../glossary/glossary.jsx';
import {figure, page} from '../host.js';
import {chosen} from '../records.js';
import {number} from '../units.js';
import {hasGrown, judgeAnew, judged, stage, story} from './judged.js';
import {TensorLink} from './link.jsx';

// The verdict as Markdown, for an issue.
export function AsMarkdown() {
  const [shown, show] = useState(false);
  const box = useRef();
  const body = judged.value.data?.markdown;
  if (body === undefined || figure || page?.report) return null;
  const {run, baseline} = chosen.value;
  const text = `### ${run}${baseline ? ` against ${baseline}` : ''}: ${story.value.headline.title}\n\n${body}\n`;
  const mark = () => {
    show(true);
    requestAnimationFrame(() => getSelection().selectAllChildren(box.current));
  };
  return (
    <>
      <Copy text={text} label="Copy as Markdown" mark={mark} />
      {shown && <pre ref={box} tabIndex={0} aria-label="The verdict as Markdown">{text}</pre>}
    </>
  );
}

/** The sign and the words for each kind of harm. */
export const HARM = {
  harmful: ['✖', 'harmed'],
  likely: ['✖', 'likely harmed'],
  gap: ['≈', 'within the limit'],
  'harmless so far': ['!', 'harmless so far'],
  none: ['✔', 'no harm'],
  unknown: ['?', 'cannot tell'],
};

/** What the page is computing, by stage. */
const NEXT = {
  none: 'Reading the losses. Tensors, cause and advice follow.',
  loss: 'Comparing tensors. Cause and advice follow.',
  comparison: 'Finding the cause. Advice follows.',
  diagnosis: 'Trying changes.',
};

export function Headline() {
  const {error, seconds} = judged.value;
  const told = story.value?.headline;
  const name = chosen.value.run;
  const brief = isBrief();
  return (
    <section class={`headline ${brief ? 'brief ' : ''}${told?.harm.replaceAll(' ', '-') ?? 'unknown'}`} aria-label="Headline" data-stage={error ? 'failed' : stage.value} data-harm={told?.harm}>
      <h1>
        {told && stage.value !== 'loss' && stage.value !== 'comparison' && <Badge harm={told.harm} />}
        <span>{name} (run){told ? `: ${titleOf(told)}` : ''}</span>
      </h1>
      {told && <Facts told={told} brief={brief} />}
      {error && <p class="soft">No verdict: {error} <button type="button" onClick={judgeAnew}>Try again</button></p>}
      {!error && stage.value !== 'all' && <p class="soft" role="status">{NEXT[stage.value]} {seconds ? `For ${Math.round(seconds)} s so far …` : '…'}</p>}
      {hasGrown.value && stage.value === 'all' && (
        <p class="soft" role="status">The records have grown since. <button type="button" onClick={judgeAnew}>Judge them anew</button></p>
      )}
    </section>
  );
}

/** Terms of the glossary for the names of facts. */
const EXPLAINED = {Gap: 'gap', Tensors: 'out of band', Why: 'cause'};

/**
 * Return true if the headline is short, which leaves more room for the view. Only the verdict's own view has the long
 * headline.
 */
const isBrief = () => Boolean(at('view')) && at('view') !== 'verdict';

/**
 * Return the title. If the losses are inconclusive, and tensors are still being compared, the title must not look like a
 * verdict.
 */
const titleOf = (told) => (told.harm === 'unknown' && told.cause === undefined ? 'the loss alone does not decide' : told.title);

export function Badge({harm}) {
  const [sign, word] = HARM[harm];
  return <span class="badge"><span aria-hidden="true">{sign}</span> {word}</span>;
}

function Facts({told, brief}) {
  const {unit, first, since, gap} = told;
  const facts = [
    told.cause_told && ['Why', <Why told={told} />],
    gap && ['Gap', <Gap gap={gap} brief={brief} />],
    told.out_of_band != null && ['Tensors', outOfBand(told)],
    first && [first.is_consequence ? 'First tensor, a consequence' : 'First tensor', <First first={first} since={since} unit={unit} interval={told.interval} />],
    told.warning && !brief && ['Early warning', <Sentence text={told.warning} />],
    told.change && !brief && ['What to do', <Sentence text={told.change} />],
  ];
  return (
    <>
      {brief && <Ways told={told} brief />}
      <dl class="facts">{facts.filter(Boolean).map(([term, fact]) => <div key={term}><dt>{term}{EXPLAINED[term] && <> <Help word={EXPLAINED[term]} /></>}</dt><dd>{fact}</dd></div>)}</dl>
      {!brief && <Words told={told} />}
      {!brief && <Ways told={told} />}
    </>
  );
}

/** Explanations of words in the sentences here and below. */
function Words({told}) {
  const hasBits = /\bbits?\b/.test(JSON.stringify(story.value));
  if (!hasBits && told.out_of_band == null && !told.first) return null;
  return (
    <p class="soft" data-words="words">
      Band <Help word="band" />: the baseline's values around a step, with their noise.
      {hasBits && <> Bits <Help word="bits" />: powers of two; 3 bits are a factor of 8, 15 bits one of 33,000.</>}
    </p>
  );
}

const Ways = ({told: {since, unit, cause}, brief}) => (
  <div class="ways">
    {since != null && <Link to={{view: 'timeline', step: since}}>{cause !== 'learning_rate' ? 'The loss' : brief ? 'Learning rate' : 'Learning rate and loss'} at {unit} {since}</Link>}
    {cause !== undefined && brief && <Link to={{view: 'verdict'}}>All the evidence</Link>}
    <AsMarkdown />
  </div>
);

const Why = ({told}) => (
  <>
    <span class="chips">
      {told.cause !== 'none' && told.cause !== 'unknown' && told.about_fp8 != null && <span class="chip">{told.about_fp8 ? 'FP8 is the cause' : 'not FP8'}</span>}
      {told.confidence && <><span class="chip">{told.confidence} confidence</span> <Help word="confidence" /></>}
    </span>{' '}
    <Sentence text={told.cause_told} />
  </>
);

const signed = (value) => `${value < 0 ? '' : '+'}${number(value)}%`;

function Gap({gap: {percent, low, high, visible, first, last, paired, of_range: ofRange}, brief}) {
  if (percent == null) return 'the loss is not finite';
  const where = `steps ${first} to ${last}, ${paired ? 'the same batches' : 'other batches'}`;
  const more = brief ? '' : `; gaps from ${number(visible)}% are visible; ${where}`;
  return <>{signed(percent)}{ofRange && " of the loss's range"} <span class="soft">(95% interval {signed(low)} to {signed(high)}{more})</span></>;
}

const outOfBand = ({out_of_band: out, tensors, first_out: first, unit}) =>
  out ? `${out} of ${tensors} are out of the baseline's band, the first since ${unit} ${first}` : `All ${tensors} stay in the baseline's band`;

/**
 * The first tensor: since when it is out of band, how many others left at the same sample, how far from the loss, and the
 * sampling interval.
 */
function First({first, since, unit, interval}) {
  const more = first.with ? `, with ${first.with} more` : '';
  const apart = since == null || first.since == null ? '' : `, ${distance(first.since - since, unit)} the loss`;
  const seen = interval > 1 ? <span class="soft"> (one sample every {interval} {unit}s)</span> : null;
  return <><TensorLink {...first} step={first.since} />{first.since == null ? '' : <> since {unit} {first.since}{more}{apart}{seen}</>}</>;
}

function distance(by, unit) {
  if (by === 0) return 'with';
  return `${Math.abs(by)} ${unit}${Math.abs(by) === 1 ? '' : 's'} ${by < 0 ? 'before' : 'after'}`;
}
