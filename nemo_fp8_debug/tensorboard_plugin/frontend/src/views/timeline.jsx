// Metrics of one tensor over the steps, of all runs that are looked at, above the loss.
import {useMemo} from 'preact/hooks';
import '@preact/signals';
import {tensor} from '../address.js';
import {Table, Tensor} from '../components/pickers.jsx';
import {currentStep, Steps} from '../components/steps.jsx';
import {chosen, PARTS, versionOf} from '../records.js';
import {useAnswer} from '../server.js';
import {dark} from '../theme.js';
import {Charts} from '../timeline/charts.jsx';
import {Events} from '../timeline/events.jsx';
import {chosenMetrics, Metrics, ofTheRun} from '../timeline/metrics.jsx';
import {eventsOf, panelsOf} from '../timeline/panels.js';
import {NoTensor} from './distribution.jsx';

/** The answers of each run that plays a part to the question about it; a run that cannot answer leaves the others be. */
function useParts(questionOf) {
  const answers = {};
  for (const part of Object.keys(PARTS)) {
    const name = chosen.value[part];
    const [route, parameters] = (name && questionOf(name)) || [];
    answers[part] = useAnswer(route, parameters, versionOf(name));
  }
  return answers;
}

export function Timeline() {
  const metrics = chosenMetrics();
  const asked = metrics.filter((name) => !ofTheRun(name)).join(',');
  const samples = useParts((run) => tensor.value && asked && ['timeline', {run, ...tensor.value, metrics: asked}]);
  const losses = useParts((run) => ['loss', {run}]);
  const waiting = [samples, losses].flatMap(Object.values).some(({data, error}) => data === undefined && !error);
  return (
    <>
      <div class="controls"><Table /><Tensor /><Steps /></div>
      <Metrics metrics={metrics} />
      {!tensor.value && <NoTensor />}
      <Problems answers={[samples, losses]} />
      {waiting && <p class="soft" role="status">Reading the record …</p>}
      <Shown metrics={metrics} samples={dataOf(samples)} losses={dataOf(losses)} />
    </>
  );
}

const dataOf = (answers) => Object.fromEntries(Object.entries(answers).map(([part, {data}]) => [part, data ?? undefined]));

function Problems({answers}) {
  const said = answers.flatMap((of) => Object.entries(of).map(([part, {error}]) => error && `${chosen.value[part]}: ${error}`)).filter(Boolean);
  return said.length ? <ul class="notes" role="status">{said.map((line) => <li key={line}>{line}</li>)}</ul> : null;
}

function Shown({metrics, samples, losses}) {
  const key = [...Object.values(samples), ...Object.values(losses)];
  const names = chosen.value;
  const panels = useMemo(() => panelsOf(tensor.value ? metrics : metrics.filter(ofTheRun), samples, losses), [metrics.join(), tensor.value, ...key]);
  const events = useMemo(() => eventsOf(samples, losses), key);
  if (!key.some(Boolean)) return null;
  return (
    <>
      <Charts key={panels.length} panels={panels} events={events} names={names} step={currentStep()} isDark={dark.value} />
      {(events.length > 0 || Object.values(losses).some(Boolean)) && <Events events={events} names={names} />}
    </>
  );
}
