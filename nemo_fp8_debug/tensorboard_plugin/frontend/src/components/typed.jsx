// A field that is typed into.
import {useState} from 'preact/hooks';

/**
 * An input that keeps what is being typed until it is entered: the page may be drawn anew meanwhile, as it is while a run grows.
 * @param {function(!Event): void} onChange called with what was entered; what it does not take is gone from the field
 */
export function Typed({value, onChange, ...props}) {
  const [typed, type] = useState(null);
  const enter = (event) => {
    onChange(event);
    type(null);
  };
  return <input {...props} value={typed ?? value} onInput={(event) => type(event.target.value)} onChange={enter} onBlur={() => type(null)} />;
}
