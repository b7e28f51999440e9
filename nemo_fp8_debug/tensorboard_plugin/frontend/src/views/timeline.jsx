// The loss of all runs that are looked at over the steps, and below it the metrics of one tensor in the baseline's band.
import {useMemo} from 'preact/hooks';
import '@preact/signals';
import {tensor} from '../address.js';
import {Table, Tensor} from '../components/pickers.jsx';
import {currentStep, Steps} from '../components/steps.jsx';
import {chosen, PARTS, versionOf} from '../records.js';
import {useAnswer} from '../server.js';
import {useBand, useDivergence} from '../story/band.js';
import {Card} from '../story/card.jsx';
import {dark} from '../theme.js';
import {currentAxes} from '../timeline/axes.js';
import {Charts} from '../timeline/charts.jsx';
import {Events} from '../timeline/events.jsx';
import {eventsOf, markersOf} from '../timeline/happened.js';
import {chosenMetrics, Metrics, ofTheRun} from '../timeline/metrics.jsx';
import {panelsOf} from '../timeline/panels.js';
import {AllValues, ValuesAt} from '../timeline/values.jsx';
import {titleOf} from '../units.js';
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
  const band = useBand(tensor.value);
  const divergence = useDivergence();
  const waiting = [...[samples, losses].flatMap(Object.values), band, divergence].some(({data, error}) => data === undefined && !error);
  return (
    <>
      <div class="controls"><Table /><Tensor /><Steps /></div>
      {tensor.value ? <Card {...tensor.value} inLine inTimeline /> : <NoTensor />}
      <Problems answers={[samples, losses]} />
      {waiting && <p class="soft" role="status">Reading the record …</p>}
      <Shown metrics={metrics} samples={dataOf(samples)} losses={dataOf(losses)} band={band.data ?? null} divergence={divergence.data ?? null} />
    </>
  );
}

const dataOf = (answers) => Object.fromEntries(Object.entries(answers).map(([part, {data}]) => [part, data ?? undefined]));

function Problems({answers}) {
  const said = answers.flatMap((of) => Object.entries(of).map(([part, {error}]) => error && `${chosen.value[part]}: ${error}`)).filter(Boolean);
  return said.length ? <ul class="notes" role="status">{said.map((line) => <li key={line}>{line}</li>)}</ul> : null;
}

function Shown({metrics, samples, losses, band, divergence}) {
  const key = [...Object.values(samples), ...Object.values(losses), band];
  const [names, axes, step] = [chosen.value, currentAxes(), currentStep()];
  const shown = ['loss', ...(tensor.value ? metrics : metrics.filter(ofTheRun))];
  const panels = useMemo(() => panelsOf(shown, samples, losses, band, axes), [shown.join(), tensor.value, axes, ...key]);
  const events = useMemo(() => eventsOf({samples, losses, divergence, band, hasBaseline: Boolean(names.baseline)}), [...key, divergence]);
  const markers = useMemo(() => markersOf({divergence, band, step}), [divergence, band, step]);
  if (!key.some(Boolean)) return null;
  const title = tensor.value ? titleOf(tensor.value) : 'the loss';
  return (
    <>
      <Charts panels={panels} events={events} markers={markers} names={names} title={title} isDark={dark.value}>
        <Metrics metrics={metrics} />
      </Charts>
      {(events.length > 0 || Object.values(losses).some(Boolean)) && <Events events={events} names={names} />}
      <ValuesAt step={step} panels={panels} names={names} />
      <AllValues panels={panels} names={names} title={title} />
    </>
  );
}
