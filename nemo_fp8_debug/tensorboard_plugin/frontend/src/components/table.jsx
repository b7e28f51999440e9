// A table that can be sorted by its headings and saved as CSV.
import {useState} from 'preact/hooks';
import {saveCsv} from '../download.js';
import {number} from '../units.js';
import {Breakable} from './basics.jsx';

/**
 * @typedef {object} Column
 * @property {string} label heading, with the unit if there is one
 * @property {string} [under] second line of the heading
 * @property {function} of value of a row, for sorting and for the CSV file
 * @property {function} [rank] value for sorting instead of `of`
 * @property {function} [from] earlier value, in columns that show `from → of`
 * @property {function} [show] what to show for a row instead of the value; undefined shows the value
 * @property {function} [cell] attributes of a row's cell
 * @property {boolean} [text] whether the column has text, which is wrapped and on the left
 */

/**
 * @param {string} name of the CSV file
 * @param {Array<Column>} columns
 * @param {Array<object>} rows in their order before sorting
 * @param {?Array} summary cells of an extra row above the others
 * @param {?Array} sorting [order, set]: the order {at, up} or null, and a function that sets it; if left out, the table
 *   keeps the order itself
 * @param {?function} stays whether a row stays above the others in every order
 * @param {number} first number of rows at first, and number of further rows for each request
 */
export function Table({name, caption, columns, rows, summary, first = Infinity, rowClass, sorting, stays}) {
  const own = useState(null);
  const [order, sort] = sorting ?? own;
  const [count, show] = useState(first);
  const sorted = onTop(stays, order && columns[order.at] ? arranged(rows, columns[order.at].rank ?? columns[order.at].of, order.up) : rows);
  const turn = (at) => sort(order?.at !== at ? {at, up: Boolean(columns[at].text)} : order.up === Boolean(columns[at].text) ? {at, up: !order.up} : null);
  const left = rows.length - count;
  return (
    <div class="table">
      <div class="wide">
        <table>
          <caption>
            {caption}
            <button type="button" class="small" onClick={() => saveCsv(name, csvOf(columns, sorted))} aria-label={`${name} as CSV`}>CSV</button>
          </caption>
          <thead>
            <tr>{columns.map((column, at) => <Heading key={at} column={column} order={order?.at === at ? order : null} turn={() => turn(at)} />)}</tr>
            {summary && <tr class="summary">{summary.map((cell, at) => (at ? <td key={at} class="n">{cell}</td> : <th key={at} scope="row">{cell}</th>))}</tr>}
          </thead>
          <tbody>
            {sorted.slice(0, count).map((row, i) => (
              <tr key={i} class={rowClass?.(row)}>
                {columns.map((column, at) => <td key={at} class={column.text ? 'text' : 'n'} {...column.cell?.(row)}>{shownIn(column, row)}</td>)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {left > 0 && <button type="button" onClick={() => show(count + Math.max(first, 30))}>{Math.min(left, Math.max(first, 30))} more of {left}</button>}
    </div>
  );
}

function Heading({column, order, turn}) {
  return (
    <th scope="col" class={column.text ? '' : 'n'} aria-sort={order ? (order.up ? 'ascending' : 'descending') : 'none'}>
      <button type="button" class="plain" onClick={turn}>
        {column.label}
        <span aria-hidden="true">{order ? (order.up ? ' ▴' : ' ▾') : ''}</span>
        {column.under && <small>{column.under}</small>}
      </button>
    </th>
  );
}

const WHOLE = 1e7;

function plain(column, value) {
  if (column.text || typeof value === 'string') return value ?? '-';
  return Number.isInteger(value) && Math.abs(value) < WHOLE ? String(value) : number(value);
}

function shownIn(column, row) {
  const instead = column.show?.(row);
  if (instead !== undefined) return instead;
  const value = plain(column, column.of(row));
  if (column.text) return <Breakable text={value} />;
  return column.from ? `${plain(column, column.from(row))} → ${value}` : value;
}

/** Sort rows by a value. Rows without a value come last in both orders. */
function arranged(rows, of, up) {
  const compare = (a, b) => (typeof a === 'string' && typeof b === 'string' ? a.localeCompare(b, 'en', {numeric: true}) : a - b);
  return [...rows].sort((a, b) => {
    const [x, y] = [of(a), of(b)];
    if (x == null || y == null) return (x == null) - (y == null);
    return up ? compare(x, y) : compare(y, x);
  });
}

const onTop = (stays, rows) => (stays ? [...rows.filter(stays), ...rows.filter((row) => !stays(row))] : rows);

const csvOf = (columns, rows) => [
  columns.flatMap(({label, under, from}) => (from ? [`${label}, before`, `${label}, after`] : [under ? `${label} ${under}` : label])),
  ...rows.map((row) => columns.flatMap(({of, from}) => (from ? [from(row), of(row)] : [of(row)]))),
];
