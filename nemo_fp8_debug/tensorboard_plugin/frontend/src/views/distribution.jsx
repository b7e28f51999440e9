// The magnitudes of a tensor at a step, the range that its format covers, and the effect of another scale or format.
import {useMemo} from 'preact/hooks';
import '@preact/signals';
import {at, go, tensor} from '../address.js';
import {amaxOf, together, unpacked} from '../cast.js';
import {Answered} from '../components/basics.jsx';
import {Table, Tensor} from '../components/pickers.jsx';
import {currentStep, Steps} from '../components/steps.jsx';
import {chosen, versionOf} from '../records.js';
import {useAnswer} from '../server.js';
import {firstTensor} from '../story/judged.js';
import {NotChosen, TensorLink} from '../story/link.jsx';
import {count, number, titleOf} from '../units.js';
import {Metrics} from '../distribution/metrics.jsx';
import {cuts, Histogram, Trial} from '../distribution/histogram.jsx';

export function Distribution() {
  const {run, baseline} = chosen.value;
  const step = currentStep();
  const of = tensor.value ?? firstTensor.value;
  const {layer, role} = of ?? {};
  // While another tensor or run is being read, do not show the old one, because it would have the wrong name.
  const shown = of && step !== null && <HistogramAnswer key={JSON.stringify([run, baseline, layer, role])} run={run} baseline={baseline} about={{layer, role, step}} />;
  return (
    <>
      <div class="controls"><Table /><Tensor first={of} /><Steps /></div>
      {!tensor.value && <NotChosen first={of} />}
      {shown}
    </>
  );
}

function HistogramAnswer({run, baseline, about}) {
  const answer = useAnswer('histogram', {run, ...about}, versionOf(run));
  const other = useAnswer(baseline && 'histogram', {run: baseline, ...about}, versionOf(baseline));
  return <Answered answer={answer}>{(histogram) => <Counts of={about} histogram={histogram} baseline={baseline && other} />}</Answered>;
}


function Counts({of, histogram, baseline}) {
  const all = useMemo(() => histogram.rows.map(unpacked), [histogram]);
  const baselineParts = useMemo(() => baseline?.data?.rows.map(unpacked), [baseline?.data]);
  const call = callOf(histogram.rows);
  const rows = call === null ? histogram.rows : [histogram.rows[call]];
  const parts = call === null ? all : [all[call]];
  const {inUse, tried, base} = cuts(rows, parts);
  const title = `${titleOf(of)}, ${chosen.value.run}, step ${histogram.step}`;
  return (
    <>
      <p data-words="values"><b><TensorLink layer={of.layer} role={of.role} /></b> at step {histogram.step}: {inWords(parts)} {castHow(histogram.recorded)}</p>
      {histogram.rows.some((row) => row.rounded) && (
        <p class="soft" data-words="rounded">
          Its float32 values were rounded to bfloat16 to be counted. Metrics computed here are approximate, and recorded ones
          are exact.
        </p>
      )}
      {histogram.rows.length > 1 && <Calls rows={histogram.rows} call={call} />}
      <Histogram title={title} parts={parts} baseline={baselineParts} baselineName={chosen.value.baseline} inUse={inUse} tried={tried}>
        {baseline && <OfBaseline baseline={baseline} step={histogram.step} />}
      </Histogram>
      <Trial base={base} tried={tried} amax={amaxOf(parts)} />
      <Metrics title={title} inUse={inUse} tried={tried} recorded={call === null ? histogram.recorded : null} />
    </>
  );
}

const some = (many, what) => (many ? `${count(many)} ${what}` : `no ${what}`);

function inWords(parts) {
  const {n, zeros, nan, inf} = together(parts);
  const share = n && zeros ? ` (${number((100 * zeros) / n)}%)` : '';
  return `${count(n)} finite values, ${some(zeros, 'zeros')}${share}, ${some(nan, 'NaN')}, ${some(inf, 'infinities')}; largest magnitude ${number(amaxOf(parts))}.`;
}

const SOURCES = {engine: 'read from the engine', emulated: 'from a history of the sampled steps', current: 'from its own largest magnitude'};

function castHow({recipe, scale_source: source}) {
  if (!recipe) return '';
  return `Measured under ${recipe}${source ? `, with a scale ${SOURCES[source] ?? source}` : ''}.`;
}

function OfBaseline({baseline, step}) {
  if (baseline.error) return <span class="soft">{chosen.value.baseline}: {baseline.error}</span>;
  if (!baseline.data) return null;
  const when = baseline.data.step === step ? '' : ` at step ${baseline.data.step}, its nearest sampled step`;
  return <span class="soft"><span class="swatch baseline" aria-hidden="true" /> the same tensor in {chosen.value.baseline}{when}</span>;
}

function callOf(rows) {
  const call = Number.parseInt(at('call') ?? '', 10);
  return rows.length > 1 && rows[call] ? call : null;
}

function Calls({rows, call}) {
  return (
    <div class="controls">
      <label>
        Calls of the step
        <select value={call ?? ''} onChange={(event) => go({call: event.target.value || null})} data-picker="call">
          <option value="">all {rows.length}, each under its own scale</option>
          {rows.map((row, i) => (
            <option key={i} value={i}>{i + 1}: {row.scale == null ? 'unknown scale' : `scale ${number(row.scale)}`}</option>
          ))}
        </select>
      </label>
    </div>
  );
}
