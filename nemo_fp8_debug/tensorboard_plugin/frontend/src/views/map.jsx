// Maps of all tensors of the runs at a step, side by side. Color shows one metric on a common scale, or the difference of
// two runs.
import {useMemo} from 'preact/hooks';
import {at, tensor} from '../address.js';
import {badnessOf, badnessOfDifference, currentChoice, differenceOf, scaleOfDifferences} from '../color/scales.js';
import {Choice, Legend} from '../color/legend.jsx';
import {Problem} from '../components/basics.jsx';
import {currentMetric, Metric, Table} from '../components/pickers.jsx';
import {Steps} from '../components/steps.jsx';
import {useMarks} from '../course/data.js';
import {cells, useSamples, valuesOf} from '../map/data.js';
import {coloringOf, useBackground} from '../map/coloring.js';
import {Panel} from '../map/panel.jsx';
import {Worst} from '../map/worst.jsx';
import {chosen, metricNamed, nameOf, PARTS, table} from '../records.js';
import {Card} from '../story/card.jsx';
import {dark} from '../theme.js';

export function MapView() {
  const metric = metricNamed(currentMetric());
  const parts = Object.keys(PARTS).filter((part) => chosen.value[part]);
  const {samples, error} = useSamples(metric.name, parts);
  const there = parts.filter((part) => samples[part]);
  useMarks();
  const background = useBackground(metric, parts, samples);
  // Draw the maps again only if something visible has changed.
  const seen = [
    metric.name, table.value, dark.value, at('layer'), at('role'), at('limits'), cells.value, currentChoice(),
    background.choice, background.spread, background.extents?.[0], ...Object.keys(PARTS).map((part) => samples[part]),
  ];
  const maps = useMemo(() => there.length > 0 && <Maps metric={metric} parts={there} samples={samples} background={background} />, seen);
  return (
    <>
      <div class="controls"><Table /><Metric /><Choice /><Steps /></div>
      {error && <Problem error={error} />}
      {there.length ? maps : !error && <p class="soft" role="status">Reading the record …</p>}
    </>
  );
}


/** The maps. The difference from the baseline comes directly after the run. */
function Maps({metric, parts, samples, background}) {
  const coloring = coloringOf(metric, parts, samples, background);
  const multiples = coloring.choice === 'spread';
  const difference = samples.run && samples.baseline ? differenceOf(metric) : undefined;
  const apart = difference && !multiples ? apartOf(metric, difference, samples) : null;
  const label = multiples ? `${metric.label}, against ${chosen.value.baseline}` : metric.unit ? `${metric.label} (${metric.unit})` : metric.label;
  const shown = parts.filter((part) => !multiples || part !== 'baseline').map((part) => <Valued key={part} part={part} metric={metric} sample={samples[part]} coloring={coloring} against={samples.baseline} />);
  if (apart) shown.splice(1, 0, <Panel key="difference" {...apart.panel} />);
  return (
    <>
      <div class="legends">
        <Legend metric={metric} label={label} {...coloring} />
        {apart && <Legend metric={metric} {...apart.legend} />}
      </div>
      <div class="side-by-side maps">{shown}</div>
      {tensor.value && <Card {...tensor.value} inLine />}
      <Worst ordered={ordered(metric, samples, difference, multiples && coloring.numberOf('run'))} parts={parts} unit={metric.unit} difference={difference} multiples={multiples} />
    </>
  );
}

function Valued({part, metric, sample, coloring, against}) {
  const multiples = coloring.choice === 'spread';
  const badness = badnessOf(metric);
  const title = multiples ? `${nameOf(part)} against ${nameOf('baseline')}, ${stepsOf(sample, against)}` : `${nameOf(part)}, step ${sample.step}`;
  return (
    <Panel
      name={part} title={title} step={sample.step} scale={coloring.scale} unit={metric.unit} badness={badness} multiples={multiples}
      values={valuesOf(sample.of, badness, coloring.numberOf(part))}
    />
  );
}

const stepsOf = (one, other) => (one.step === other.step ? `step ${one.step}` : `step ${one.step} against ${other.step}`);

/** Return the properties of the panel and the legend for the difference between the run and the baseline. */
function apartOf(metric, difference, {run, baseline}) {
  const badness = badnessOfDifference(metric);
  const values = valuesOf((layer, role) => difference.of(run.of(layer, role), baseline.of(layer, role)), badness);
  const numbers = values.map((one) => one.number);
  const scale = scaleOfDifferences(metric, numbers);
  const {unit, show} = difference;
  return {
    panel: {name: 'difference', title: `${nameOf('run')} against ${nameOf('baseline')}, ${stepsOf(run, baseline)}`, step: run.step, values, scale, unit, badness, show},
    legend: {
      choice: 'difference', scale, show, automatic: [scale.from(scale.low), scale.from(scale.high)], fixed: true,
      distribution: {values: numbers.filter((value) => !Number.isNaN(value))}, label: unit ? `${difference.label} (${unit})` : difference.label,
    },
  };
}

/** Return all tensors, the worst first. Rank them by their difference from the baseline, or else by their own value. */
function ordered(metric, samples, difference, multipleOf) {
  const badness = badnessOf(metric);
  const apartness = badnessOfDifference(metric);
  const rows = cells.value.tensors.map((tensor) => {
    const by = Object.fromEntries(Object.entries(samples).map(([part, sample]) => [part, sample ? sample.of(tensor.layer, tensor.role) : NaN]));
    const apart = difference ? difference.of(by.run, by.baseline) : NaN;
    const times = multipleOf ? multipleOf(tensor.layer, tensor.role, by.run) : NaN;
    const own = alone(metric, badness(by.run ?? NaN));
    return {tensor, by, apart, times, sort: multipleOf ? (Number.isNaN(times) ? own : badness(times)) : Number.isNaN(apart) ? own : apartness(apart)};
  });
  return rows.filter((row) => !Number.isNaN(row.by.run)).sort((a, b) => b.sort - a.sort || badness(b.by.run) - badness(a.by.run));
}

// A value cannot be ranked among ratios. So on a log scale, tensors that the baseline does not have come first.
const alone = (metric, value) => (metric.scale === 'log' ? Infinity : value);
