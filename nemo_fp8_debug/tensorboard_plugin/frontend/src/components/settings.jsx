// Settings of runs side by side.
import {Table} from './table.jsx';

/** What there is to say of a setting in a word. */
const wordOf = (row) => (row.telling ? 'bears on precision' : row.differs === false ? '' : 'differs');

/**
 * @param {Array<{setting, good, bad, telling, differs}>} differences
 * @param {Array<string>} names of the runs: good, bad
 */
export function DifferencesTable({differences, names}) {
  if (!differences.length) return <p>None that the fingerprints know of.</p>;
  return <SettingsTable name={`settings of ${names.join(' and ')}`} caption="Marked: what bears on precision" rows={differences} names={names} first={15} />;
}

export function SettingsTable({name, caption, rows, names, first}) {
  const [good, bad] = names;
  const columns = [
    {label: 'setting', of: (row) => row.setting, text: true},
    {label: good, of: (row) => row.good, text: true},
    ...(bad ? [{label: bad, of: (row) => row.bad, text: true}, {label: 'difference', of: wordOf, text: true}] : []),
  ];
  return <Table name={name} caption={caption} columns={columns} rows={rows} first={first} rowClass={(row) => (row.telling ? 'telling' : row.differs ? 'differs' : '')} />;
}
