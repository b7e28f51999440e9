// The loss of all shown runs over the steps, and below it the metrics of one tensor with the baseline's band.
import {useMemo} from 'preact/hooks';
import '@preact/signals';
import {tensor} from '../address.js';
import {Table, Tensor} from '../components/pickers.jsx';
import {currentStep, Steps} from '../components/steps.jsx';
import {AlsoShow, dataOf, isAwaited, Problems, useRuns} from '../runs/also.jsx';
import {shownRuns} from '../runs/beside.js';
import {firstTensor, useBand, useDivergence} from '../story/judged.js';
import {Card} from '../story/card.jsx';
import {NotChosen} from '../story/link.jsx';
import {dark} from '../theme.js';
import {currentAxes, panelsOf} from '../timeline/option.js';
import {AllValues, Charts, Events, ValuesAt} from '../timeline/charts.jsx';
import {eventsOf, markersOf} from '../timeline/happened.js';
import {chosenMetrics, Metrics, ofTheRun} from '../timeline/metrics.jsx';
import {titleOf} from '../units.js';

export function Timeline() {
  const metrics = chosenMetrics();
  const asked = metrics.filter((name) => !ofTheRun(name)).join(',');
  const of = tensor.value ?? firstTensor.value;
  const samples = useRuns((run) => of && asked && ['timeline', {run, ...of, metrics: asked}]);
  const losses = useRuns((run) => ['loss', {run}]);
  const band = useBand(of);
  const divergence = useDivergence();
  const waiting = [samples, losses, {band, divergence}].some(isAwaited);
  return (
    <>
      <div class="controls"><Table /><Tensor first={of} /><Steps /></div>
      <AlsoShow />
      {!tensor.value && <NotChosen first={of} />}
      {of && <Card {...of} inLine inTimeline />}
      <Problems answers={[samples, losses]} />
      {waiting && <p class="soft" role="status">Reading the record …</p>}
      <Shown of={of} metrics={metrics} samples={dataOf(samples)} losses={dataOf(losses)} band={band.data ?? null} divergence={divergence.data ?? null} />
    </>
  );
}

function Shown({of, metrics, samples, losses, band, divergence}) {
  const key = [...Object.values(samples), ...Object.values(losses), band];
  const [names, axes, step] = [shownRuns.value, currentAxes(), currentStep()];
  const shown = ['loss', ...(of ? metrics : metrics.filter(ofTheRun))];
  const panels = useMemo(() => panelsOf(shown, samples, losses, band, axes), [shown.join(), axes, ...key]);
  const events = useMemo(() => eventsOf({samples, losses, divergence, band, hasBaseline: Boolean(names.baseline)}), [...key, divergence]);
  const markers = useMemo(() => markersOf({divergence, band, step, hasBaseline: Boolean(names.baseline)}), [divergence, band, step, names.baseline]);
  if (!key.some(Boolean)) return null;
  const title = of ? titleOf(of) : 'the loss';
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
