// Files in which values of a tensor were dumped, where there are any.
import {chosen, versionOf} from '../records.js';
import {useAnswer} from '../server.js';

export function Dumps({tensor}) {
  const {run} = chosen.value;
  const {data} = useAnswer('dumps', {run, ...tensor}, versionOf(run));
  if (!data?.count) return null;
  const left = data.count - data.files.length;
  return (
    <details class="dumps">
      <summary>Dump: {data.count} file{data.count === 1 ? '' : 's'} of its values in {run}</summary>
      <ul>
        {left > 0 && <li class="soft">{left} earlier ones, and:</li>}
        {data.files.map(({step, rank, name}) => <li key={name}>step {step}, rank {rank}: <code>{name}</code></li>)}
      </ul>
    </details>
  );
}
