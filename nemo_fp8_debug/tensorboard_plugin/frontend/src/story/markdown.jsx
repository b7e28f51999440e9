// The verdict as Markdown, for an issue.
import {useRef, useState} from 'preact/hooks';
import {Copy} from '../components/copy.jsx';
import {figure, page} from '../host.js';
import {chosen} from '../records.js';
import {judged, story} from './judged.js';

export function AsMarkdown() {
  const [shown, show] = useState(false);
  const box = useRef();
  const body = judged.value.data?.markdown;
  if (body === undefined || figure || page?.report) return null;
  const {run, baseline} = chosen.value;
  const text = `### ${run}${baseline ? ` against ${baseline}` : ''}: ${story.value.headline.title}\n\n${body}\n`;
  const mark = () => {
    show(true);
    requestAnimationFrame(() => getSelection().selectAllChildren(box.current));
  };
  return (
    <>
      <Copy text={text} label="Copy as Markdown" mark={mark} />
      {shown && <pre ref={box} tabIndex={0} aria-label="The verdict as Markdown">{text}</pre>}
    </>
  );
}
