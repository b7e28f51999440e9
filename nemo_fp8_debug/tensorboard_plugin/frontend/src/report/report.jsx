// A report: views of each run, one below the other.
import {useEffect, useRef} from 'preact/hooks';
import {figureOf, idOf} from './figures.js';

/**
 * @param {string} title
 * @param {string[]} told notes about the report itself
 * @param {Array<{title, about, figures: Array<{title, state}>}>} sections one for each run
 */
export function Report({title, told, sections}) {
  useEffect(() => {
    const details = () => [...document.querySelectorAll('details:not([open])')];
    const open = () => details().forEach((one) => (one.open = true));
    window.addEventListener('beforeprint', open);
    return () => window.removeEventListener('beforeprint', open);
  }, []);
  return (
    <div class="report">
      <div class="report-head">
        <h1>{title}</h1>
        {told.map((sentence) => <p key={sentence} class="soft">{sentence}</p>)}
      </div>
      {sections.map((section) => <Section key={section.title} {...section} several={sections.length > 1} />)}
    </div>
  );
}

const Section = ({title, about, figures, several}) => (
  <article>
    {several && <h1>{title}</h1>}
    {about && <p class="soft">{about}</p>}
    {figures.map((figure) => <Drawn key={idOf(figure.state)} {...figure} />)}
  </article>
);

function Drawn({title, state}) {
  const box = useRef();
  useEffect(() => {
    globalThis.fp8Debug(figureOf(box.current, state));
  }, []);
  return (
    <section id={idOf(state)} class="report-figure" data-view={state.view}>
      <h2>{title}</h2>
      <div ref={box} />
    </section>
  );
}
