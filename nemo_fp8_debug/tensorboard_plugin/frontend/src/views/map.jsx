// Every tensor of the runs at a step, one metric as color: side by side on one scale, and what sets them apart.
import {useMemo} from 'preact/hooks';
import {at, tensor} from '../address.js';
import {Problem} from '../components/notice.jsx';
import {currentMetric, Metric, Table} from '../components/pickers.jsx';
import {Steps} from '../components/steps.jsx';
import {cells} from '../map/cells.js';
import {useSamples} from '../map/frames.js';
import {Legend} from '../map/legend.jsx';
import {Panel} from '../map/panel.jsx';
import {badnessOf, badnessOfDifference, differenceOf, scaleOf, scaleOfDifferences} from '../map/scales.js';
import {valuesOf} from '../map/values.js';
import {Worst} from '../map/worst.jsx';
import {chosen, metricNamed, PARTS, table} from '../records.js';
import {Card} from '../story/card.jsx';
import {dark} from '../theme.js';

export function MapView() {
  const metric = metricNamed(currentMetric());
  const parts = Object.keys(PARTS).filter((part) => chosen.value[part]);
  const {samples, extents, error} = useSamples(metric.name, parts);
  const there = parts.filter((part) => samples[part]);
  // Drawn anew only where something else is to be seen.
  const seen = [metric.name, table.value, dark.value, at('layer'), at('role'), cells.value, ...Object.keys(PARTS).flatMap((part) => [samples[part], JSON.stringify(extents[part])])];
  const maps = useMemo(() => <Maps metric={metric} parts={there} samples={samples} extents={extents} />, seen);
  return (
    <>
      <div class="controls"><Table /><Metric /><Steps /></div>
      {error && <Problem error={error} />}
      {there.length ? maps : !error && <p class="soft" role="status">Reading the record …</p>}
    </>
  );
}

function Maps({metric, parts, samples, extents}) {
  const {unit} = metric;
  const badness = badnessOf(metric);
  const scale = scaleOf(metric, parts.map((part) => extents[part]));
  const difference = samples.run && samples.baseline ? differenceOf(metric) : undefined;
  return (
    <>
      <Legend scale={scale} unit={unit} label={metric.label} />
      <div class="side-by-side">
        {parts.map((part) => (
          <Panel
            key={part} name={part} title={`${PARTS[part].label} ${chosen.value[part]}, step ${samples[part].step}`}
            step={samples[part].step} values={valuesOf(samples[part].of, badness)} scale={scale} unit={unit} badness={badness}
          />
        ))}
        {difference && <Difference metric={metric} difference={difference} run={samples.run} baseline={samples.baseline} />}
      </div>
      {tensor.value && <Card {...tensor.value} inLine />}
      <Worst ordered={ordered(metric, samples, difference)} parts={parts} unit={unit} difference={difference?.unit} />
    </>
  );
}

function Difference({metric, difference, run, baseline}) {
  const badness = badnessOfDifference(metric);
  const values = valuesOf((layer, role) => difference.of(run.of(layer, role), baseline.of(layer, role)), badness);
  const scale = scaleOfDifferences(metric, values.map((one) => one.value));
  const names = run.step === baseline.step ? `${chosen.value.run} against ${chosen.value.baseline}` : `${chosen.value.run} at step ${run.step} against ${chosen.value.baseline} at ${baseline.step}`;
  return (
    <div>
      <Panel name="difference" title={`Difference: ${names}`} step={run.step} values={values} scale={scale} unit={difference.unit} badness={badness} />
      <Legend scale={scale} unit={difference.unit} label="difference" />
    </div>
  );
}

/** All tensors, the worst first: by what sets them apart, and by their own value those that the baseline has not. */
function ordered(metric, samples, difference) {
  const badness = badnessOf(metric);
  const apartness = badnessOfDifference(metric);
  const rows = cells.value.tensors.map((tensor) => {
    const by = Object.fromEntries(Object.entries(samples).map(([part, sample]) => [part, sample ? sample.of(tensor.layer, tensor.role) : NaN]));
    const apart = difference ? difference.of(by.run, by.baseline) : NaN;
    return {tensor, by, apart, sort: Number.isNaN(apart) ? alone(metric, badness(by.run ?? NaN)) : apartness(apart)};
  });
  return rows.filter((row) => !Number.isNaN(row.by.run)).sort((a, b) => b.sort - a.sort || badness(b.by.run) - badness(a.by.run));
}

// A ratio to nothing cannot be ranked among ratios: it comes first.
const alone = (metric, value) => (metric.scale === 'log' ? Infinity : value);
