// The rows of the table of runs, and their verdicts. Verdicts are requested one after the other, those of visible rows
// first.
import {computed, effect, signal} from '@preact/signals';
import {askAgain} from '../kept.js';
import {about, chosen, known} from '../records.js';
import {watchJob} from '../server.js';
import {source} from '../source.js';
import {isJudging, judged, story} from '../story/judged.js';

const AGAIN_MS = 300;
const AFTER_AN_ERROR_MS = 5000;

export const baseline = computed(() => chosen.value.baseline);

/** Data from the records of runs, by name. */
const read = signal({});

/** Verdicts by run and baseline: {headline, version} or {error}. They stay until they are requested again. */
export const verdicts = signal({});

/** The run {name, seconds} whose verdict is being computed, or null. */
export const working = signal(null);

export const keyOf = (name) => JSON.stringify([name, baseline.value]);

/**
 * Read the rows, and read them again whenever a record has grown or the baseline has changed. Return a function that ends
 * this.
 */
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

/** Store the verdicts in rows, which the server has cached. */
function take(rows) {
  const there = verdicts.peek();
  const kept = Object.entries(rows).filter(([name, {headline}]) => headline && !there[keyOf(name)]);
  if (kept.length) verdicts.value = {...there, ...Object.fromEntries(kept.map(([name, {headline, version}]) => [keyOf(name), {headline, version}]))};
}

/** Return the verdict of a run. For the selected run, use the headline's verdict, which may include a reference run. */
function verdictOf(run) {
  if (run.name === baseline.value || ['empty', 'unreadable'].includes(run.state)) return {};
  if (run.name === chosen.value.run) {
    const told = story.value?.headline;
    return told?.cause === undefined ? {error: judged.value.error} : {headline: told};
  }
  const found = verdicts.value[keyOf(run.name)];
  return {...found, hasGrown: Boolean(found?.version && run.version) && found.version !== run.version};
}

/** @returns {Array<object>} for each run, its data from `runs` and `rows`, and {headline, error, hasGrown} */
export const rows = () => known.value.runs.map((run) => ({...read.value[run.name], ...run, headline: undefined, ...verdictOf(run)}));

/** Return whether a run still needs a verdict. */
export const isOpen = ({name, state, headline, error}) => source.live && name !== baseline.value && !['empty', 'unreadable'].includes(state) && !headline && !error;

/** Drop the verdicts of runs whose records have grown, so that they are requested again. */
export function judgeGrownAnew() {
  const grown = new Set(rows().filter((row) => row.hasGrown).map(({name}) => keyOf(name)));
  verdicts.value = Object.fromEntries(Object.entries(verdicts.value).filter(([key]) => !grown.has(key)));
}

// Verdicts are computed one after the other, for visible rows first. While the selected run's verdict is being computed, we
// wait.
const PAUSE_MS = 300;

/** @param {function} open function that returns the names of runs that need a verdict, in the order of their rows */
export function keepJudging(open) {
  let timer;
  let end = () => {};
  const next = () => {
    const names = isJudging.value || document.visibilityState !== 'visible' ? [] : open().filter((name) => name !== chosen.value.run);
    const name = names.find(isSeen) ?? names[0];
    working.value = name === undefined ? null : {name};
    if (name === undefined) timer = setTimeout(next, PAUSE_MS);
    else end = judge(name, next);
  };
  next();
  return () => {
    clearTimeout(timer);
    end();
    working.value = null;
  };
}

function judge(name, then) {
  const [key, version] = [keyOf(name), about(name)?.version];
  return watchJob('headline', {run: name, baseline: baseline.value}, ({loading, seconds, data, error}) => {
    if (loading) {
      working.value = {name, seconds};
      return;
    }
    verdicts.value = {...verdicts.value, [key]: error ? {error} : {headline: data, version}};
    then();
  });
}

function isSeen(name) {
  const cell = [...document.querySelectorAll('[data-run]')].find((one) => one.dataset.run === name);
  const box = cell?.getBoundingClientRect();
  return Boolean(box) && box.bottom > 0 && box.top < window.innerHeight;
}
