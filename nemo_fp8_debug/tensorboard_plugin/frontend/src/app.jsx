// The page: the choice of runs, the choice of the view, and the view.
import {useEffect, useRef} from 'preact/hooks';
import {at, go} from './address.js';
import {Notice, Problem} from './components/basics.jsx';
import {Runs} from './components/pickers.jsx';
import {details} from './details.js';
import {Glossary} from './glossary/glossary.jsx';
import {namesOf} from './names.js';
import {about, chosen, keepLooking, known, PARTS, unreachable} from './records.js';
import {useAnswers} from './server.js';
import {Headline} from './story/headline.jsx';
import {Course} from './views/course.jsx';
import {Distribution} from './views/distribution.jsx';
import {Fingerprints} from './views/fingerprints.jsx';
import {MapView} from './views/map.jsx';
import {AllRuns} from './views/runs.jsx';
import {Timeline} from './views/timeline.jsx';
import {Verdict} from './views/verdict.jsx';
import {WhatIf} from './views/what_if.jsx';

/**
 * The views. `of` is the kind of run that a view accepts: any run, or any readable run. By default, the run must have
 * samples.
 */
const VIEWS = {
  verdict: {label: 'Verdict', show: Verdict},
  course: {label: 'Course', show: Course},
  map: {label: 'Map', show: MapView},
  timeline: {label: 'Timeline', show: Timeline},
  distribution: {label: 'Distribution', show: Distribution},
  what_if: {label: 'What if', show: WhatIf},
  runs: {label: 'Runs', show: AllRuns, of: 'any'},
  fingerprints: {label: 'Fingerprints', show: Fingerprints, of: 'readable'},
};

export function App() {
  useEffect(keepLooking, []);
  useTitle();
  if (!known.value) return unreachable.value ? <Problem error={unreachable.value} /> : <p class="soft" role="status">Looking for records …</p>;
  if (!known.value.runs.length) return <NoRecord />;
  const view = VIEWS[at('view')] ? at('view') : 'verdict';
  return (
    <>
      {unreachable.value && <Problem error={unreachable.value} />}
      <header>
        <Views view={view} />
        <Runs />
      </header>
      <Glossary />
      <Headline />
      <main>
        <div id="view" role="tabpanel" aria-labelledby={`tab-${view}`} data-view={VIEWS[view].label}>
          <h2 class="unseen">{VIEWS[view].label}</h2>
          <Notes />
          <Shown view={view} />
        </div>
      </main>
    </>
  );
}

/** Set the document's title, for screen readers and for the title of a standalone window. */
function useTitle() {
  const view = VIEWS[at('view')] ?? VIEWS.verdict;
  const title = `${view.label}${chosen.value.run ? ` of ${chosen.value.run}` : ''} · nemo_fp8_debug`;
  useEffect(() => {
    document.title = title;
  }, [title]);
}

/** If a change of the view removes the focused element, for example after Enter on the map, focus the new view's tab. */
function useFocusOnTab(view) {
  const before = useRef(view);
  useEffect(() => {
    const changed = before.current !== view;
    before.current = view;
    if (changed && document.hasFocus() && document.activeElement === document.body) document.getElementById(`tab-${view}`).focus({preventScroll: true});
  }, [view]);
}

function Views({view}) {
  useFocusOnTab(view);
  const names = Object.keys(VIEWS);
  const keys = (event) => {
    const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!by) return;
    const next = names[(names.indexOf(view) + by + names.length) % names.length];
    go({view: next}, true);
    document.getElementById(`tab-${next}`).focus();
  };
  return (
    <div role="tablist" aria-label="Views" class="tabs" onKeyDown={keys}>
      {names.map((name) => (
        <button
          key={name} type="button" role="tab" id={`tab-${name}`} aria-selected={name === view} aria-controls="view"
          tabIndex={name === view ? 0 : -1} onClick={() => go({view: name}, true)}
        >
          {VIEWS[name].label}
        </button>
      ))}
    </div>
  );
}

export function Shown({view}) {
  const {show: View, of} = VIEWS[view];
  if (of === 'any') return <View />;
  const run = about(chosen.value.run);
  if (!run) return <Notice title="No such run"><p>The run in the address is not under the logdir; choose another one above.</p></Notice>;
  if (run.state === 'unreadable') return <Problem error={`${run.name} cannot be read: ${run.why}`} />;
  if (run.state === 'empty' && of !== 'readable') {
    return (
      <Notice title={`${run.name} has no samples yet`}>
        <p>Its first sampled step will appear here. The callback's interval sets how often steps are sampled.</p>
      </Notice>
    );
  }
  return <View />;
}

function Notes() {
  const notes = Object.entries(details.value).flatMap(([part, {data, error}]) =>
    [...(data?.notes ?? []), ...(error ? [error] : [])].map((note) => `${chosen.value[part]}: ${note}`),
  );
  const renamed = useRenamed();
  const refused = (known.value.refused ?? []).map(({name, why}) => `${name}: ${why}`);
  const all = [...(known.value.told ?? []), ...refused, ...missing(), ...renamed, ...notes];
  if (!all.length) return null;
  return <div role="status"><ul class="notes">{all.map((note) => <li key={note}>{note}</li>)}</ul></div>;
}

/** Return a sentence for each run whose layers have other names in its record than in the baseline's record. */
function useRenamed() {
  const runs = [chosen.value.run, chosen.value.reference];
  const {data} = useAnswers(runs.map(namesOf));
  return runs.flatMap((run, i) => (data?.[i]?.how ? [`${run}: its layers have the names of ${chosen.value.baseline}. ${data[i].how}`] : []));
}

/** Return a sentence for a baseline or reference run in the address that was not found. An empty name means no run. */
const missing = () =>
  ['baseline', 'reference'].filter((part) => at(part) && !about(at(part))).map((part) => `${PARTS[part].label} ${at(part)} is not under the logdir, so the page does not use it.`);

function NoRecord() {
  return (
    <Notice title="No record of FP8 here">
      <p>There is no run record under {known.value.logdirs.map((path) => <code key={path}>{path} </code>)}. Add the callback to a run:</p>
      <pre>{'from nemo_fp8_debug import FP8DebugCallback\n\ntrainer = nl.Trainer(..., callbacks=[FP8DebugCallback(interval=100)])'}</pre>
      <p>Its record is next to TensorBoard's events, and appears here with its first sampled step. This page checks every 10 seconds.</p>
      <Notes />
    </Notice>
  );
}
