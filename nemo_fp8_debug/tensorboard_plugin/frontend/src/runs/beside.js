// The runs that Course and Timeline show, as chosen in the table of runs: their colors and their lines.
import {computed} from '@preact/signals';
import {at, go} from '../address.js';
import {about, chosen, known, nameOf, PARTS} from '../records.js';
import {colorAt, COLORS, STROKES} from '../theme.js';

// What is chosen in the table of runs, in the address: the filter, the order, what is pinned.
const asList = (names) => (names.length ? names.map(encodeURIComponent).join(',') : null);

export const pinned = () => (at('pinned') ? at('pinned').split(',').map(decodeURIComponent) : []);

export function turnPin(name) {
  const names = pinned();
  go({pinned: asList(names.includes(name) ? names.filter((one) => one !== name) : [...names, name])});
}

export const filterText = () => at('run_filter') ?? '';
export const setFilter = (text) => go({run_filter: text || null});

/**
 * Whether a run's name passes the filter, as TensorBoard's run filter has it: a regular expression that is found anywhere in
 * it, in upper or lower case. One that is none lets nothing pass.
 * @returns {{passes: function(string): boolean, error: ?string}}
 */
export function filter() {
  try {
    const pattern = new RegExp(filterText(), 'i');
    return {passes: (name) => pattern.test(name), error: null};
  } catch (error) {
    return {passes: () => false, error: error.message};
  }
}

/** [order, set] of a table with these columns; the address has the column's label, with - in front if the largest come first. */
export function sorting(columns) {
  const [, down, label] = /^(-?)(.*)$/s.exec(at('run_sort') ?? '');
  const place = columns.findIndex((column) => column.label === label);
  const set = (order) => go({run_sort: order && `${order.up ? '' : '-'}${columns[order.at].label}`});
  return [place < 0 ? null : {at: place, up: !down}, set];
}

// Colors of runs where more than three are shown: those that TensorBoard gives them.
export const colorOf = (name) => colorAt(Math.max(0, known.value.colored.indexOf(name)));

/** Runs that are shown at once. */
export const MOST = 8;
const BESIDE = 'also ';

/** Strokes of runs beside the three, on and off by turns. */
const DASHES = [[9, 3, 2, 3], [9, 3, 2, 3, 2, 3], [3, 3], [15, 4], [1, 4], [6, 2, 1, 2, 1, 2, 1, 2], [12, 3, 5, 3]];

const keyOf = (name) => BESIDE + name;

/** Whether a key of `shownRuns` is that of a run beside the three. */
export const isBeside = (key) => key.startsWith(BESIDE);

const plays = (name) => Object.values(chosen.value).includes(name);
const hasSamples = (name) => ['growing', 'ended', 'still'].includes(about(name)?.state);

/** Runs that could be shown beside the three. */
export const candidates = computed(() => (known.value?.runs ?? []).map(({name}) => name).filter((name) => hasSamples(name) && !plays(name)));

const wanted = computed(() => pinned().filter((name) => candidates.value.includes(name)));
const room = computed(() => MOST - Object.values(chosen.value).filter(Boolean).length);

/** Pinned runs beside the three, as many as there is room for: {key, name}. */
export const beside = computed(() => wanted.value.slice(0, room.value).map((name) => ({key: keyOf(name), name})));
/** Whether no other run can be shown, and how many that are pinned are not. */
export const isFull = computed(() => wanted.value.length >= room.value);
export const leftOut = computed(() => wanted.value.length - beside.value.length);

/** By key, names of the runs that are shown: those of `chosen` by part, then the others. */
export const shownRuns = computed(() => ({...chosen.value, ...Object.fromEntries(beside.value.map(({key, name}) => [key, name]))}));

/** The name of a run by its key, and its part where the name does not say it. */
export const calledBy = (key) => (key in PARTS ? nameOf(key) : shownRuns.value[key]);

const WIDTH = 1.6;

/** How ECharts draws the line of a run: the run that is looked at lies above the others. */
export function drawnAs(key) {
  const line = lineOf(key);
  return {color: line.color, lineStyle: {...line, width: WIDTH}, emphasis: {disabled: true}, z: key === 'run' ? 4 : 3};
}

/** {color, type}: the color and the strokes of a run. */
export function lineOf(key) {
  if (!isBeside(key)) return {color: COLORS[key], type: STROKES[key]};
  const place = beside.value.findIndex((one) => one.key === key);
  return {color: colorOf(beside.value[place].name), type: DASHES[place]};
}
