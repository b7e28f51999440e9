// Runs are judged one after the other: those whose rows can be seen first, and none while the run that is looked at is judged.
import {about, chosen} from '../records.js';
import {watchJob} from '../server.js';
import {isJudging} from '../story/judged.js';
import {baseline, keyOf, verdicts, working} from './rows.js';

const PAUSE_MS = 300;

/** @param {function} open names of the runs that are still to be judged, in the order of their rows */
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
