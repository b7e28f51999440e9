// The columns of the table of runs.
import {Breakable, Link} from '../components/basics.jsx';
import {chosen, exchange, PARTS} from '../records.js';
import {Badge, HARM} from '../story/headline.jsx';
import {number, titleOf} from '../units.js';
import {colorOf, pinned, turnPin} from './beside.js';
import {baseline, isOpen, working} from './rows.js';

const STATES = {
  growing: ['growing', 'The run adds samples.'],
  ended: ['ended', 'The run has reported its end.'],
  still: ['silent', 'No new samples for a while, and the run has not reported its end.'],
  empty: ['nothing recorded', 'No step was sampled yet.'],
  unreadable: ['unreadable', ''],
};

const HARMS = Object.keys(HARM);
const SURE = ['high', 'medium', 'low'];

const rankIn = (words, word) => (word === undefined ? null : words.indexOf(word));
const spaced = (word) => word?.replaceAll('_', ' ');
const ratio = (value) => `${value < 0 ? '' : '+'}${number(value)}%`;

export const columns = () => [
  {label: 'pin', of: ({name}) => Number(pinned().includes(name)), show: Pin},
  {label: 'run', of: ({name}) => name, text: true, show: Name, cell: ({name}) => ({'data-run': name})},
  {label: 'part', of: ({name}) => partOf(name), text: true, show: Parts},
  {label: 'state', of: ({state}) => STATES[state][0], text: true, show: State},
  {label: 'verdict', of: verdictTold, rank: ({headline}) => rankIn(HARMS, headline?.harm), text: true, show: Verdict},
  {label: 'cause', of: ({headline}) => spaced(headline?.cause), text: true},
  {label: 'confidence', of: ({headline}) => headline?.confidence, rank: ({headline}) => rankIn(SURE, headline?.confidence), text: true},
  {label: 'gap', under: '95% interval', of: ({headline}) => headline?.gap?.percent, show: Gap},
  {label: 'first tensor', of: ({headline}) => headline?.first && titleOf(headline.first), text: true, show: First},
  {label: 'recipe', of: (row) => recipeOf(row), text: true, cell: () => ({style: {minWidth: '11rem'}})},
  {label: 'last step', of: lastStep},
  {label: 'samples', of: ({samples}) => samples},
  {label: 'loss', of: ({loss}) => loss, show: Loss},
  {label: 'updated', of: ({updated}) => updated && new Date(1000 * updated).toISOString(), rank: ({updated}) => updated, text: true, show: Updated},
];

const partOf = (name) => Object.keys(PARTS).find((part) => chosen.value[part] === name);

function Pin({name}) {
  const is = pinned().includes(name);
  return <button type="button" class="plain" aria-pressed={is} aria-label={`Pin ${name}`} onClick={() => turnPin(name)}>{is ? '★' : '☆'}</button>;
}

const Name = ({name}) => <span class="run-name"><span class="dot" style={{background: colorOf(name)}} aria-hidden="true" /><Breakable text={name} /></span>;

const Parts = ({name, state}) => (
  <span class="parts">
    {Object.entries(PARTS).map(([part, {label}]) => (
      <button key={part} type="button" class="small" aria-pressed={chosen.value[part] === name} aria-label={`${name} as ${label.toLowerCase()}`} disabled={state === 'unreadable'} onClick={() => exchange(part, name)}>
        {part}
      </button>
    ))}
  </span>
);

const State = ({state, why}) => <span title={why ?? STATES[state][1]}>{STATES[state][0]}{state === 'unreadable' && <small class="block soft">{why}</small>}</span>;

function verdictTold({name, headline, error}) {
  if (headline) return HARM[headline.harm][1];
  return name === baseline.value ? 'the baseline' : error && `no verdict: ${error}`;
}

function Verdict(row) {
  const {name, headline, hasGrown} = row;
  if (headline) {
    return (
      <>
        <span class={headline.harm.replaceAll(' ', '-')} title={headline.title}><Badge harm={headline.harm} /></span>
        {hasGrown && <small class="block soft">grown since</small>}
      </>
    );
  }
  const told = verdictTold(row);
  if (told || !isOpen(row)) return <span class="soft">{told ?? '-'}</span>;
  const isNow = working.value?.name === name || chosen.value.run === name;
  return <span class="soft">{isNow ? `judging${working.value?.seconds ? `, ${Math.round(working.value.seconds)} s` : ''} …` : 'waiting …'}</span>;
}

function Gap({headline}) {
  if (!headline?.gap) return '-';
  const {percent, low, high} = headline.gap;
  return percent == null ? 'not finite' : <>{ratio(percent)}<small class="block soft">{ratio(low)} to {ratio(high)}</small></>;
}

function First({name, headline}) {
  const first = headline?.first;
  if (!first) return '-';
  return (
    <>
      <Link to={{run: name, view: 'timeline', layer: first.layer, role: first.role, ...(first.since == null ? {} : {step: first.since})}}><Breakable text={titleOf(first)} /></Link>
      {first.since != null && <small class="block soft">since {headline.unit} {first.since}{first.is_consequence ? ', a consequence' : ''}</small>}
    </>
  );
}

/** Return the last step of a run, sampled or not. */
function lastStep({last, loss_step: trained}) {
  return last == null || trained == null ? last ?? trained : Math.max(last, trained);
}

const recipeOf = ({recipe, is_quantized: quantized}) => (quantized === false ? 'not quantized' : recipe);

function Loss({loss, loss_step: step}) {
  if (step == null) return '-';
  return <span title={`at step ${step}`}>{loss == null ? 'not finite' : number(loss)}</span>;
}

const UNITS = [['day', 86_400], ['hour', 3600], ['minute', 60]];

function Updated({updated}) {
  if (!updated) return '-';
  const ago = Math.max(0, Date.now() / 1000 - updated);
  const [unit, size] = UNITS.find(([, seconds]) => ago >= seconds) ?? ['second', 1];
  const told = new Intl.RelativeTimeFormat('en', {numeric: 'always'}).format(-Math.floor(ago / size), unit);
  return <span title={new Date(1000 * updated).toLocaleString()}>{told}</span>;
}
