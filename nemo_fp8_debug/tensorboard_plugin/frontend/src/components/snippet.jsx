// A file for a host: to read, to copy and to save.
import {useRef} from 'preact/hooks';
import {saveText} from '../download.js';
import {Copy} from './copy.jsx';
import {Sentence} from './notice.jsx';

export function Snippet({name, about, text, coarser}) {
  const box = useRef();
  return (
    <section class="snippet" aria-label={name}>
      <div class="controls">
        <h4><Sentence text={about} />: <code>{name}</code></h4>
        <button type="button" onClick={() => saveText(name, text)} aria-label={`Save ${name}`}>Save</button>
        <Copy text={text} about={`Copy ${name}`} mark={() => getSelection().selectAllChildren(box.current)} />
      </div>
      {coarser.map((sentence) => <p key={sentence} class="soft">{sentence}</p>)}
      <pre ref={box} tabIndex={0} aria-label={`Text of ${name}`}>{text}</pre>
    </section>
  );
}
