// A button that copies a text.
import {useState} from 'preact/hooks';

/**
 * @param {string} text
 * @param {string} label of the button
 * @param {function} mark has the text marked, ready for the keyboard: browsers have a clipboard on https and localhost only
 * @param {string} [about] what is copied, where the label does not say it
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
