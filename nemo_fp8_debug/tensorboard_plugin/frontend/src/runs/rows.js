// The rows of the table: what the list of runs says of each, what its record says, and its verdict as soon as it is known.
import {computed, effect, signal} from '@preact/signals';
import {askAgain} from '../kept.js';
import {chosen, known} from '../records.js';
import {source} from '../source.js';
import {judged, story} from '../story/judged.js';

const AGAIN_MS = 300;
const AFTER_AN_ERROR_MS = 5000;

export const baseline = computed(() => chosen.value.baseline);

/** What their records say of runs, by name. */
const read = signal({});

/** Verdicts by run and baseline: {headline, version} or {error}. They stay until they are asked for anew. */
export const verdicts = signal({});

/** The run that is judged now, {name, seconds}; null: none is. */
export const working = signal(null);

export const keyOf = (name) => JSON.stringify([name, baseline.value]);

/** Ask what records say, anew whenever one has grown or the baseline is another one. */
export function keepReading() {
  let timer;
  let times = 0;
  const look = (against, mine) =>
    askAgain('rows', {baseline: against}).then(
      ({rows, is_complete: complete}) => {
        if (mine !== times) return;
        read.value = {...read.value, ...rows};
        take(rows);
        if (!complete) timer = setTimeout(look, AGAIN_MS, against, mine);
      },
      () => source.live && mine === times && (timer = setTimeout(look, AFTER_AN_ERROR_MS, against, mine)),
    );
  const stop = effect(() => {
    void known.value;
    clearTimeout(timer);
    look(baseline.value, ++times);
  });
  return () => {
    stop();
    clearTimeout(timer);
    times += 1;
  };
}

/** Verdicts that were kept from earlier. */
function take(rows) {
  const there = verdicts.peek();
  const kept = Object.entries(rows).filter(([name, {headline}]) => headline && !there[keyOf(name)]);
  if (kept.length) verdicts.value = {...there, ...Object.fromEntries(kept.map(([name, {headline, version}]) => [keyOf(name), {headline, version}]))};
}

/** The verdict of the run that is looked at is that of the headline, which may know of a reference run. */
function verdictOf(run) {
  if (run.name === baseline.value || ['empty', 'unreadable'].includes(run.state)) return {};
  if (run.name === chosen.value.run) {
    const told = story.value?.headline;
    return told?.cause === undefined ? {error: judged.value.error} : {headline: told};
  }
  const found = verdicts.value[keyOf(run.name)];
  return {...found, hasGrown: Boolean(found?.version && run.version) && found.version !== run.version};
}

/** @returns {Array<object>} of all runs what `runs` and `rows` answer, and {headline, error, hasGrown} */
export const rows = () => known.value.runs.map((run) => ({...read.value[run.name], ...run, headline: undefined, ...verdictOf(run)}));

/** Whether a run is still to be judged. */
export const isOpen = ({name, state, headline, error}) => source.live && name !== baseline.value && !['empty', 'unreadable'].includes(state) && !headline && !error;

/** Judge those anew whose records have grown since. */
export function judgeGrownAnew() {
  const grown = new Set(rows().filter((row) => row.hasGrown).map(({name}) => keyOf(name)));
  verdicts.value = Object.fromEntries(Object.entries(verdicts.value).filter(([key]) => !grown.has(key)));
}
