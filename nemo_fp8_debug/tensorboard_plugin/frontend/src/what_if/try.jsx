// Recipes that are not in the record. On request, the server replays them from the record's histograms.
import {signal} from '@preact/signals';
import {useEffect, useState} from 'preact/hooks';
import {at, go} from '../address.js';
import {Problem, Typed} from '../components/basics.jsx';
import {called} from '../names.js';
import {useJob} from '../server.js';

const BETWEEN = ';';

/** Return the recipes to try from the address. */
export const asked = () => [...new Set((at('what_if') ?? '').split(BETWEEN).filter(Boolean))];
const ask = (recipes) => go({what_if: recipes.length ? recipes.join(BETWEEN) : null});

const KEPT = 60;
/**
 * Answers {version, rows} or {version, error} by question. `version` is the record's version at the time of the question.
 */
const tried = signal(new Map());
const keyOf = (question) => JSON.stringify(question);
/** Return the rows of a question. Rows of an earlier version stay until the new rows have arrived. */
export function rowsOf(question) {
  const answer = tried.value.get(keyOf(question));
  return answer?.rows && called('what_if', question, answer).rows;
}

function keep(question, answer) {
  tried.value = new Map([...tried.value, [keyOf(question), answer]].slice(-KEPT));
}

function forgetFailures() {
  tried.value = new Map([...tried.value].filter(([, answer]) => !answer.error));
}

/** Return a recipe's name as in numerics/recipe.py, without options that have their default. */
function nameOf({scaling, format, margin, history}) {
  if (scaling !== 'delayed') return `${scaling}-${format}`;
  const options = [margin && `margin=${margin}`, history !== 1024 && `amax_history_len=${history}`].filter(Boolean);
  return `delayed-${format}${options.length ? `(${options.join(',')})` : ''}`;
}

const historyIn = (recipes) => Number(/amax_history_len=(\d+)/.exec(recipes.join(' '))?.[1] ?? 1024);
const whole = (text, least, most) => Math.min(most, Math.max(least, Number.parseInt(text, 10) || least));

/** @param {Array<string>} inUse recipes in use; the form starts with their length of the amax history */
export function Picker({inUse}) {
  const [wanted, want] = useState({scaling: 'current', format: 'hybrid', margin: 0, history: historyIn(inUse)});
  const set = (more) => want({...wanted, ...more});
  const delayed = wanted.scaling === 'delayed';
  const tryOut = (event) => {
    event.preventDefault();
    forgetFailures();
    ask([...asked(), nameOf(wanted)]);
  };
  return (
    <form class="controls" onSubmit={tryOut} aria-label="Try another recipe">
      <label>
        Try another recipe
        <select value={wanted.scaling} onChange={(event) => set({scaling: event.target.value})} data-picker="scaling">
          <option value="current">current scaling</option>
          <option value="delayed">delayed scaling</option>
        </select>
      </label>
      <label>
        Format
        <select value={wanted.format} onChange={(event) => set({format: event.target.value})} data-picker="format">
          <option value="hybrid">E4M3, dY in E5M2</option>
          <option value="e4m3">E4M3</option>
          <option value="e5m2">E5M2</option>
        </select>
      </label>
      {delayed && (
        <label>
          Margin (powers of 2)
          <Typed type="number" min="0" max="20" value={wanted.margin} onChange={(event) => set({margin: whole(event.target.value, 0, 20)})} data-picker="margin" />
        </label>
      )}
      {delayed && (
        <label>
          History (samples)
          <Typed type="number" min="1" max="4096" value={wanted.history} onChange={(event) => set({history: whole(event.target.value, 1, 4096)})} data-picker="history" />
        </label>
      )}
      <button type="submit">Try</button>
      <Asked />
    </form>
  );
}

function Asked() {
  return asked().map((recipe) => (
    <button key={recipe} type="button" class="small" onClick={() => ask(asked().filter((other) => other !== recipe))} aria-label={`Leave ${recipe} out`}>
      {recipe} ✕
    </button>
  ));
}

/** Asks the questions one after the other. Asks again if the record has another version. */
export function Trying({questions, version}) {
  const failed = questions.map((question) => [question, tried.value.get(keyOf(question))?.error]).filter(([, error]) => error);
  const next = questions.find((question) => tried.value.get(keyOf(question))?.version !== version);
  return (
    <>
      {failed.map(([question, error]) => <Problem key={question.recipe} error={`${question.recipe} could not be tried: ${error}`} />)}
      {failed.length > 0 && <button type="button" onClick={forgetFailures}>Try again</button>}
      {next && <Settled key={`${version} ${keyOf(next)}`} question={next} version={version} />}
    </>
  );
}

const SETTLED_MS = 400;

/** Asks only after the question has stayed the same for a moment, because a dragged slider changes the step often. */
function Settled({question, version}) {
  const [settled, settle] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => settle(true), SETTLED_MS);
    return () => clearTimeout(timer);
  }, []);
  const job = useJob(settled ? 'what_if' : null, question, version);
  useEffect(() => {
    if (job.data) keep(question, {version, rows: job.data.rows});
    else if (job.error) keep(question, {version, error: job.error});
  }, [job.data, job.error]);
  return <p class="soft" role="status">Trying {question.recipe} with the histograms of step {question.step}{job.seconds ? `, for ${Math.round(job.seconds)} s so far` : ''} …</p>;
}
