// A file for a host: to read, to copy and to save.
import {useRef, useState} from 'preact/hooks';
import {saveText} from '../download.js';
import {Sentence} from './notice.jsx';

export function Snippet({name, about, text, coarser}) {
  const box = useRef();
  const [said, say] = useState('');
  // Browsers have a clipboard on https and localhost only; elsewhere the text is marked, ready for the keyboard.
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      say('Copied.');
    } catch {
      getSelection().selectAllChildren(box.current);
      say('Marked: press Ctrl+C (⌘C) to copy.');
    }
  };
  return (
    <section class="snippet" aria-label={name}>
      <div class="controls">
        <h4><Sentence text={about} />: <code>{name}</code></h4>
        <button type="button" onClick={copy} aria-label={`Copy ${name}`}>Copy</button>
        <button type="button" onClick={() => saveText(name, text)} aria-label={`Save ${name}`}>Save</button>
        <span class="soft" role="status">{said}</span>
      </div>
      {coarser.map((sentence) => <p key={sentence} class="soft">{sentence}</p>)}
      <pre ref={box} tabIndex={0} aria-label={`Text of ${name}`}>{text}</pre>
    </section>
  );
}
