// What happened in which step, to read and to go to.
import '@preact/signals';
import {go} from '../address.js';
import {saveCsv} from '../download.js';
import {Stroke} from '../runs/also.jsx';
import {KINDS} from './happened.js';

const MOST = 100;

export function Events({events, names}) {
  if (!events.length) return <p class="soft" data-events="none">Nothing stands out: the loss does not diverge, no metric leaves the band, no spikes, skipped steps or triggered samples.</p>;
  const rows = () => [['step', 'run', 'what', 'why'], ...events.map(({step, part, kind, why}) => [step, names[part], KINDS[kind].label, why])];
  return (
    <div class="wide">
      <table data-table="events">
        <caption>
          {events.length > MOST ? `The first ${MOST} of ${events.length} events` : 'What happened, in order'}{' '}
          <button type="button" onClick={() => saveCsv('events', rows())}>CSV</button>
        </caption>
        <thead><tr><th scope="col" class="n">Step</th><th scope="col">Run</th><th scope="col">What</th><th scope="col">Why</th></tr></thead>
        <tbody>
          {events.slice(0, MOST).map(({step, part, kind, why}) => (
            <tr key={`${part} ${kind} ${step} ${why}`} data-event={kind}>
              <td class="n"><button type="button" onClick={() => go({step})} aria-label={`Look at step ${step}`}>{step}</button></td>
              <td><Stroke of={part} /> {names[part]}</td>
              <td>{KINDS[kind].label}</td>
              <td class="text">{why}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
