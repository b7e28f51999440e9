// Every tensor of the runs at a step, one figure as colour: side by side on one scale, and what sets them apart.
import {useMemo} from 'preact/hooks';
import {at} from '../address.js';
import {Problem} from '../components/notice.jsx';
import {currentFigure, Figure} from '../components/pickers.jsx';
import {Steps} from '../components/steps.jsx';
import {cells} from '../map/cells.js';
import {useSamples} from '../map/frames.js';
import {Legend} from '../map/legend.jsx';
import {Panel} from '../map/panel.jsx';
import {badnessOf, badnessOfDifference, differenceOf, scaleOf, scaleOfDifferences} from '../map/scales.js';
import {valuesOf} from '../map/values.js';
import {Worst} from '../map/worst.jsx';
import {chosen, figureNamed, PARTS} from '../records.js';
import {dark} from '../theme.js';

export function MapView() {
  const figure = figureNamed(currentFigure());
  const parts = Object.keys(PARTS).filter((part) => chosen.value[part]);
  const {samples, extents, error} = useSamples(figure.name, parts);
  const there = parts.filter((part) => samples[part]);
  // Drawn anew only where something else is to be seen.
  const seen = [figure.name, dark.value, at('layer'), at('role'), cells.value, ...Object.keys(PARTS).flatMap((part) => [samples[part], JSON.stringify(extents[part])])];
  const maps = useMemo(() => <Maps figure={figure} parts={there} samples={samples} extents={extents} />, seen);
  return (
    <>
      <div class="controls"><Figure /><Steps /></div>
      {error && <Problem error={error} />}
      {there.length ? maps : !error && <p class="soft" role="status">Reading the record …</p>}
    </>
  );
}

function Maps({figure, parts, samples, extents}) {
  const {unit} = figure;
  const badness = badnessOf(figure);
  const scale = scaleOf(figure, parts.map((part) => extents[part]));
  const difference = samples.run && samples.good ? differenceOf(figure) : undefined;
  return (
    <>
      <Legend scale={scale} unit={unit} label={figure.label} />
      <div class="side-by-side">
        {parts.map((part) => (
          <Panel
            key={part} name={part} title={`${PARTS[part].label} ${chosen.value[part]}, step ${samples[part].step}`}
            step={samples[part].step} values={valuesOf(samples[part].of, badness)} scale={scale} unit={unit} badness={badness}
          />
        ))}
        {difference && <Difference figure={figure} difference={difference} run={samples.run} good={samples.good} />}
      </div>
      <Worst ordered={ordered(figure, samples, difference)} parts={parts} unit={unit} difference={difference?.unit} />
    </>
  );
}

function Difference({figure, difference, run, good}) {
  const badness = badnessOfDifference(figure);
  const values = valuesOf((layer, role) => difference.of(run.of(layer, role), good.of(layer, role)), badness);
  const scale = scaleOfDifferences(figure, values.map((one) => one.value));
  const names = run.step === good.step ? `${chosen.value.run} against ${chosen.value.good}` : `${chosen.value.run} at step ${run.step} against ${chosen.value.good} at ${good.step}`;
  return (
    <div>
      <Panel name="difference" title={`Difference: ${names}`} step={run.step} values={values} scale={scale} unit={difference.unit} badness={badness} />
      <Legend scale={scale} unit={difference.unit} label="difference" />
    </div>
  );
}

/** All tensors, the worst first: by what sets them apart, and by their own value those that the good run has not. */
function ordered(figure, samples, difference) {
  const badness = badnessOf(figure);
  const apartness = badnessOfDifference(figure);
  const rows = cells.value.tensors.map((tensor) => {
    const by = Object.fromEntries(Object.entries(samples).map(([part, sample]) => [part, sample ? sample.of(tensor.layer, tensor.role) : NaN]));
    const apart = difference ? difference.of(by.run, by.good) : NaN;
    return {tensor, by, apart, sort: Number.isNaN(apart) ? alone(figure, badness(by.run ?? NaN)) : apartness(apart)};
  });
  return rows.filter((row) => !Number.isNaN(row.by.run)).sort((a, b) => b.sort - a.sort || badness(b.by.run) - badness(a.by.run));
}

// A ratio to nothing cannot be ranked among ratios: it comes first.
const alone = (figure, value) => (figure.scale === 'log' ? Infinity : value);
