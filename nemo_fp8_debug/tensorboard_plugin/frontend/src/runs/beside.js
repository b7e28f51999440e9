// The runs that Course and Timeline show, and their colors and lines. The user pins further runs in the table of runs.
import {computed} from '@preact/signals';
import {at, go} from '../address.js';
import {about, chosen, known, nameOf, PARTS} from '../records.js';
import {colorAt, COLORS, STROKES} from '../theme.js';

// The user's choices in the table of runs, kept in the address: the filter, the order, and the pinned runs.
const asList = (names) => (names.length ? names.map(encodeURIComponent).join(',') : null);

export const pinned = () => (at('pinned') ? at('pinned').split(',').map(decodeURIComponent) : []);

export function turnPin(name) {
  const names = pinned();
  go({pinned: asList(names.includes(name) ? names.filter((one) => one !== name) : [...names, name])});
}

export const filterText = () => at('run_filter') ?? '';
export const setFilter = (text) => go({run_filter: text || null});

/**
 * Return a test of whether a run's name passes the filter, as in TensorBoard: a regular expression that matches anywhere in
 * the name, in upper or lower case. No name passes an invalid expression.
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

/**
 * Return [order, set] for a table with these columns. The address contains the column's label, after - for descending order.
 */
export function sorting(columns) {
  const [, down, label] = /^(-?)(.*)$/s.exec(at('run_sort') ?? '');
  const place = columns.findIndex((column) => column.label === label);
  const set = (order) => go({run_sort: order && `${order.up ? '' : '-'}${columns[order.at].label}`});
  return [place < 0 ? null : {at: place, up: !down}, set];
}

// Colors of runs if more than three are shown: the colors of these runs in TensorBoard.
export const colorOf = (name) => colorAt(Math.max(0, known.value.colored.indexOf(name)));

/** Largest number of runs that are shown at once. */
export const MOST = 8;
const BESIDE = 'also ';

/** Dash patterns of runs in addition to the three: lengths of strokes and gaps in turn. */
const DASHES = [[9, 3, 2, 3], [9, 3, 2, 3, 2, 3], [3, 3], [15, 4], [1, 4], [6, 2, 1, 2, 1, 2, 1, 2], [12, 3, 5, 3]];

const keyOf = (name) => BESIDE + name;

/** Return whether a key of `shownRuns` belongs to a run in addition to the three. */
export const isBeside = (key) => key.startsWith(BESIDE);

const plays = (name) => Object.values(chosen.value).includes(name);
const hasSamples = (name) => ['growing', 'ended', 'still'].includes(about(name)?.state);

/** Runs that can be shown in addition to the three. */
export const candidates = computed(() => (known.value?.runs ?? []).map(({name}) => name).filter((name) => hasSamples(name) && !plays(name)));

const wanted = computed(() => pinned().filter((name) => candidates.value.includes(name)));
const room = computed(() => MOST - Object.values(chosen.value).filter(Boolean).length);

/** Pinned runs {key, name} that are shown in addition to the three, as many as there is room for. */
export const beside = computed(() => wanted.value.slice(0, room.value).map((name) => ({key: keyOf(name), name})));
/** Whether there is no room for further runs, and how many pinned runs are not shown. */
export const isFull = computed(() => wanted.value.length >= room.value);
export const leftOut = computed(() => wanted.value.length - beside.value.length);

/** Names of all shown runs by key: those of `chosen` by part, then the others. */
export const shownRuns = computed(() => ({...chosen.value, ...Object.fromEntries(beside.value.map(({key, name}) => [key, name]))}));

/** Return the name of a run by its key, followed by its part if the name does not show it. */
export const calledBy = (key) => (key in PARTS ? nameOf(key) : shownRuns.value[key]);

const WIDTH = 1.6;

/** Return ECharts' options for the line of a run. The selected run is drawn above the others. */
export function drawnAs(key) {
  const line = lineOf(key);
  return {color: line.color, lineStyle: {...line, width: WIDTH}, emphasis: {disabled: true}, z: key === 'run' ? 4 : 3};
}

/** Return {color, type}: the color and the dash pattern of a run. */
export function lineOf(key) {
  if (!isBeside(key)) return {color: COLORS[key], type: STROKES[key]};
  const place = beside.value.findIndex((one) => one.key === key);
  return {color: colorOf(beside.value[place].name), type: DASHES[place]};
}
