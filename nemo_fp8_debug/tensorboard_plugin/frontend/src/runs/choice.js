// What is chosen in the table of runs, in the address: the filter, the order, what is pinned.
import {at, go} from '../address.js';

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
