// The settings of two runs, differences first.
import {at, go} from '../address.js';
import {Answered, Link, Notice} from '../components/basics.jsx';
import {SettingsTable} from '../components/settings.jsx';
import {chosen, PARTS, versionOf} from '../records.js';
import {useAnswer} from '../server.js';
import {flat} from '../settings.js';
import {number} from '../units.js';

export function Fingerprints() {
  const {run, baseline, reference} = chosen.value;
  const against = {baseline, reference};
  const part = against[at('against')] ? at('against') : baseline ? 'baseline' : reference ? 'reference' : undefined;
  const [a, b] = part ? [against[part], run] : [run, undefined];
  const answer = useAnswer('fingerprints', {a, b}, versionOf(...[a, b].filter(Boolean)));
  return (
    <>
      <div class="controls">
        {baseline && reference && (
          <label>
            Beside
            <select value={part} onChange={(event) => go({against: event.target.value})} data-picker="against">
              {Object.keys(against).map((name) => <option key={name} value={name}>{PARTS[name].label}: {against[name]}</option>)}
            </select>
          </label>
        )}
        <label>
          Search
          <input type="search" value={at('setting') ?? ''} onInput={(event) => go({setting: event.target.value || null})} data-picker="setting" />
        </label>
        {b && (
          <label>
            <input type="checkbox" checked={at('differs') === '1'} onChange={(event) => go({differs: event.target.checked ? 1 : null})} data-picker="differs" />
            Differences only
          </label>
        )}
      </div>
      <Answered answer={answer}>{(data) => <Settings {...data} names={[a, b].filter(Boolean)} />}</Answered>
      {!b && (
        <Notice>
          <p>This is the fingerprint of {run} alone. Choose a baseline or a reference run above to see the differences.</p>
        </Notice>
      )}
    </>
  );
}

function Settings({a, b, differences, learning_rates: rates, names}) {
  const found = (at('setting') ?? '').toLowerCase();
  const all = b ? beside(a, b, differences) : flat(a).map(([setting, baseline]) => ({setting, baseline}));
  const rows = all
    .filter((row) => !b || at('differs') !== '1' || row.differs)
    .filter((row) => [row.setting, row.baseline, row.run].some((text) => text?.toLowerCase().includes(found)));
  const telling = differences.filter((row) => row.telling).length;
  return (
    <>
      {b && <p class="told">{told(differences.length, telling)}</p>}
      {rates && <Rates rates={rates} names={names} />}
      {rows.length ? (
        <SettingsTable name={`fingerprint of ${names.join(' and ')}`} caption={`${rows.length} of ${all.length} settings`} rows={rows} names={names} />
      ) : (
        <p>{found ? `No setting matches “${at('setting')}”.` : 'The settings do not differ.'}</p>
      )}
    </>
  );
}

/** A note on different learning rates. Settings do not contain the learning rate of each step, but the record does. */
const Rates = ({rates: {step, before, run, baseline}, names}) => (
  <p class="told" data-words="rates">
    Their learning rates differ too: first at <Link to={{view: 'timeline', step}}>step {step}</Link>{before === null ? '' : ` (still the same at step ${before})`}, where {names[1]} has {number(run)} and {names[0]} {number(baseline)}.
  </p>
);

/**
 * Return rows of all settings: first those that differ, the ones that affect precision at the top, and then equal settings.
 */
function beside(a, b, differences) {
  const apart = new Set(differences.map((row) => row.setting));
  const same = flat(b).filter(([setting]) => !apart.has(setting)).map(([setting, value]) => ({setting, baseline: value, run: value, differs: false}));
  return [...differences.map((row) => ({...row, differs: true})), ...same];
}

function told(n, telling) {
  if (!n) return 'All settings of the two fingerprints are the same.';
  const bears = telling === 0 ? 'none of which affects precision' : `${telling} of which ${telling === 1 ? 'affects' : 'affect'} precision`;
  return n === 1 ? `They differ in 1 setting${telling ? ', which affects precision' : ', which does not affect precision'}.` : `They differ in ${n} settings, ${bears}.`;
}
