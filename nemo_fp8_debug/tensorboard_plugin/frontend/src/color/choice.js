// What colors stand for, and from where to where: as the address has it, or as the values suggest.
import {at, go} from '../address.js';
import {chosen} from '../records.js';

/** What colors can stand for. */
export const CHOICES = {
  spread: 'changes against the baseline',
  all: 'values, limits of all steps',
  step: 'values, limits of this step',
};

/** What can be chosen now: without a baseline no change is known. */
export const offered = () => Object.keys(CHOICES).filter((name) => name !== 'spread' || chosen.value.baseline);

export const currentChoice = () => (offered().includes(at('color')) ? at('color') : offered()[0]);

// The limits say what they are of: those of another metric or choice are passed over.
const nameOf = (metric, choice) => `${metric.name} ${choice}`;

/** [low, high] that somebody set; null: none. */
export function limitsSet(metric, choice) {
  const found = /^(\S+ \S+) (\S+) (\S+)$/.exec(at('limits') ?? '');
  const ends = found?.[1] === nameOf(metric, choice) ? [Number(found[2]), Number(found[3])] : [];
  return ends.length && ends.every(Number.isFinite) && ends[0] < ends[1] ? ends : null;
}

const short = (value) => Number(value.toPrecision(4));

/** @param {?Array<number>} ends null: as the values suggest */
export const setLimits = (metric, choice, ends) => go({limits: ends && `${nameOf(metric, choice)} ${ends.map(short).join(' ')}`});
