// The glossary. A "?" above the views opens it, and a "?" next to a word opens it at this word.
import {useEffect, useRef, useState} from 'preact/hooks';
import {at, go} from '../address.js';
import {Sentence} from '../components/basics.jsx';
import {figure, page} from '../host.js';
import {withText} from './words.js';

/** A button that opens the glossary. @param {string} [word] term at which the glossary opens */
export function Help({word}) {
  if (figure || page?.report) return null; // reports have no glossary
  const label = word ? `What "${word}" means` : 'What the words mean';
  return <button type="button" class="help" title={label} aria-label={label} aria-haspopup="dialog" onClick={() => go({word: word ?? ''}, true)}>?</button>;
}

/** The glossary, shown while the address contains a word. */
export function Glossary() {
  const word = at('word');
  return word === undefined ? null : <Opened key={word} word={word} />;
}

function Opened({word}) {
  const dialog = useRef();
  const [text, seek] = useState(word);
  const sections = withText(text);
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  const close = () => dialog.current.close();
  return (
    <dialog ref={dialog} class="glossary" aria-label="Glossary" onClose={() => go({word: null})} onClick={(event) => event.target === dialog.current && close()}>
      <div class="controls">
        <h2>Glossary</h2>
        <label>Search <input value={text} onInput={(event) => seek(event.target.value)} /></label>
        <button type="button" onClick={close}>Close</button>
      </div>
      {!sections.length && <p role="status">No word has “{text}”.</p>}
      {sections.map(({title, words}) => <Section key={title} title={title} words={exactFirst(words, text)} />)}
    </dialog>
  );
}

const exactFirst = (words, text) => [...words.filter(({term}) => term === text), ...words.filter(({term}) => term !== text)];

const Section = ({title, words}) => (
  <>
    <h3>{title}</h3>
    <dl>{words.map(({term, meaning}) => <div key={term}><dt><Sentence text={term} /></dt><dd><Sentence text={meaning} /></dd></div>)}</dl>
  </>
);
