// The charts as tables: all values at the step that is looked at, and all values there are.
import {useSignal} from '@preact/signals';
import {Table} from '../components/table.jsx';
import {calledBy} from '../runs/beside.js';
import {tableOf} from './panels.js';
import {rowsAt} from './tip.js';

export function ValuesAt({step, panels, names}) {
  if (step === null) return null;
  const [headings, ...rows] = rowsAt(step, panels, names);
  return (
    <div class="wide">
      <table data-table="values">
        <caption>Values at step {step}, or at the recorded step next to it</caption>
        <thead><tr>{headings.map((text, i) => <th key={i} scope="col" class={i ? 'n' : ''}>{i ? text : 'metric'}</th>)}</tr></thead>
        <tbody>
          {rows.map(([label, ...cells], i) => (
            <tr key={panels[i].name} data-metric={panels[i].name}>
              <th scope="row">{label}</th>
              {cells.map((text, j) => <td key={j} class="n">{text || '-'}</td>)}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

export function AllValues({panels, names, title}) {
  const open = useSignal(false);
  return (
    <details onToggle={(event) => (open.value = event.currentTarget.open)}>
      <summary>All values as a table</summary>
      {open.value && <Rows panels={panels} names={names} title={title} />}
    </details>
  );
}

function Rows({panels, names, title}) {
  const [, ...rows] = tableOf(panels, names);
  const called = Object.fromEntries(Object.entries(names).filter(([, name]) => name).map(([key, name]) => [name, calledBy(key)]));
  const columns = [
    {label: 'run', of: (row) => row[0], show: (row) => called[row[0]], text: true},
    {label: 'step', of: (row) => row[1]},
    ...panels.map(({label, unit}, i) => ({label: unit ? `${label} (${unit})` : label, of: (row) => row[i + 2]})),
  ];
  return <Table name={`timeline of ${title}`} caption={`What the charts show of ${title}`} columns={columns} rows={rows} first={30} />;
}
