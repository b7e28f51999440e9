// Tables of the settings of two runs.
import {Table} from './table.jsx';

/** Return a short remark on a setting. */
const wordOf = (row) => (row.telling ? 'affects precision' : row.differs === false ? '' : 'differs');

/**
 * @param {Array<{setting, baseline, run, telling, differs}>} differences
 * @param {Array<string>} names of the runs: baseline, run
 */
export function DifferencesTable({differences, names}) {
  if (!differences.length) return <p>The fingerprints do not differ.</p>;
  return <SettingsTable name={`settings of ${names.join(' and ')}`} caption="Marked: settings that affect precision" rows={differences} names={names} first={15} />;
}

export function SettingsTable({name, caption, rows, names, first}) {
  const [baseline, run] = names;
  const columns = [
    {label: 'setting', of: (row) => row.setting, text: true},
    {label: baseline, of: (row) => row.baseline, text: true},
    ...(run ? [{label: run, of: (row) => row.run, text: true}, {label: 'difference', of: wordOf, text: true}] : []),
  ];
  return <Table name={name} caption={caption} columns={columns} rows={rows} first={first} rowClass={(row) => (row.telling ? 'telling' : row.differs ? 'differs' : '')} />;
}
