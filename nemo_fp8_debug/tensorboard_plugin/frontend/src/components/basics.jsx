// Small pieces: breakable names, links, notices, fields, and texts to copy or save.
import {Fragment} from 'preact';
import {useRef, useState} from 'preact/hooks';
import {go, linkTo} from '../address.js';
import {saveText} from '../download.js';

// Names that may break into lines between their parts, and nowhere else.
const BETWEEN_PARTS = /(?<=[._,]|\w\()(?=[A-Za-z])/;

export const Breakable = ({text}) => String(text).split(BETWEEN_PARTS).map((part, i) => <Fragment key={i}>{i > 0 && <wbr />}{part}</Fragment>);

// Links to other states of the page. A click changes this page. Like other links, they can also open in a new tab.
/**
 * @param {object} to changes of the address, as for `go`
 * @param {?string} label text for screen readers, if it differs from the visible text
 */
export function Link({to, label, children, ...more}) {
  const follow = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    go(to, true);
  };
  return <a href={linkTo(to)} target="_parent" aria-label={label} onClick={follow} {...more}>{children}</a>;
}

// A button that copies a text.
/**
 * @param {string} text
 * @param {string} label of the button
 * @param {function} mark function that selects the text, so that the user can copy it by keyboard. Browsers give scripts a
 *   clipboard only on https and localhost.
 * @param {string} [about] what is copied, if the label does not say this
 */
export function Copy({text, label = 'Copy', about, mark}) {
  const [said, say] = useState('');
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      say('Copied.');
    } catch {
      mark();
      say('Marked: press Ctrl+C (⌘C) to copy.');
    }
  };
  return (
    <>
      <button type="button" onClick={copy} aria-label={about}>{label}</button>
      <span class="soft" role="status">{said}</span>
    </>
  );
}

// A notice that is shown if there is nothing else to show.
export const Notice = ({title, children}) => (
  <div class="notice" role="status">
    {title && <h2>{title}</h2>}
    {children}
  </div>
);

export const Problem = ({error}) => (
  <div class="notice problem" role="alert">
    <p>{error}</p>
  </div>
);

/** Shows that an answer is awaited, or its error, or else the children. */
export function Answered({answer, children}) {
  if (answer.error) return <Problem error={answer.error} />;
  if (!answer.data) return <p class="soft" role="status">Reading the record …</p>;
  return children(answer.data);
}

/** A sentence. Text between backticks is shown as code. */
export const Sentence = ({text}) => text.split('`').map((part, i) => (i % 2 ? <code key={i}>{part}</code> : part));

// A field for typing.
/**
 * An input that keeps unfinished text. While a run grows, the page is drawn again, and this must not lose the text.
 * @param {function(!Event): void} onChange called with the entered value; a value that it does not accept is removed from
 *   the field
 */
export function Typed({value, onChange, ...props}) {
  const [typed, type] = useState(null);
  const enter = (event) => {
    onChange(event);
    type(null);
  };
  return <input {...props} value={typed ?? value} onInput={(event) => type(event.target.value)} onChange={enter} onBlur={() => type(null)} />;
}

// A file for a training framework, to read, copy and save.
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
