// All runs under the logdir: how far each is, and its verdict against the baseline.
import {useEffect, useRef} from 'preact/hooks';
import {Table} from '../components/table.jsx';
import {chosen} from '../records.js';
import {filter, filterText, pinned, setFilter, sorting} from '../runs/beside.js';
import {columns} from '../runs/columns.jsx';
import {baseline, isOpen, judgeGrownAnew, keepJudging, keepReading, rows} from '../runs/rows.js';
import {source} from '../source.js';

export function AllRuns() {
  const {passes, error} = filter();
  const all = rows();
  const shown = all.filter(({name}) => passes(name));
  const open = useRef();
  open.current = shown.filter(isOpen).map(({name}) => name);
  useEffect(keepReading, []);
  useEffect(() => keepJudging(() => open.current), []);
  const columnsNow = columns();
  const pins = new Set(pinned());
  return (
    <>
      <div class="controls">
        <label title="A regular expression, as in TensorBoard's run filter. Case is ignored.">
          Filter runs (regex)
          <input type="search" value={filterText()} onInput={(event) => setFilter(event.target.value)} aria-invalid={Boolean(error)} data-picker="run-filter" />
        </label>
        {error && <span role="alert">{error}</span>}
        <Grown all={all} />
      </div>
      <p class="soft" role="status">{told(all, shown)}</p>
      <Table
        name="runs" caption={caption()} columns={columnsNow} rows={shown} sorting={sorting(columnsNow)}
        stays={pins.size ? ({name}) => pins.has(name) : null} rowClass={({name}) => (name === chosen.value.run ? 'looked-at' : '')}
      />
    </>
  );
}

const WHOLE = source.live ? 'all are judged' : 'only verdicts in this page are shown';

const counted = (n, word) => `${n} ${word}${n === 1 ? '' : 's'}`;

function told(all, shown) {
  const left = shown.filter(isOpen).length;
  const some = shown.length < all.length ? `${shown.length} of ` : '';
  return `${some}${counted(all.length, 'run')}; ${left ? `${left} to be judged, visible rows first` : WHOLE}.`;
}

function caption() {
  const {run, reference} = chosen.value;
  if (!baseline.value) return 'Without a baseline, each run is judged by its own losses and tensors';
  return `Verdicts against ${baseline.value}${reference ? `. The verdict on ${run} also uses the reference run ${reference}` : ''}`;
}

function Grown({all}) {
  const grown = all.filter(({hasGrown}) => hasGrown).length;
  if (!grown) return null;
  return <span class="soft" role="status">{counted(grown, 'run')} {grown === 1 ? 'has' : 'have'} grown since {grown === 1 ? 'it was' : 'they were'} judged. <button type="button" onClick={judgeGrownAnew}>Judge anew</button></span>;
}
