// Every tensor of the runs at a step, one figure as colour: side by side on one scale, and what sets them apart.
import {useMemo} from 'preact/hooks';
import {at} from '../address.js';
import {Problem} from '../components/notice.jsx';
import {currentFigure, Figure} from '../components/pickers.jsx';
import {Steps} from '../components/steps.jsx';
import {cells} from '../map/cells.js';
import {useSamples} from '../map/frames.js';
import {Legend} from '../map/legend.jsx';
import {Panel, valuesOf} from '../map/panel.jsx';
import {differenceOf, scaleOf, scaleOfDifferences} from '../map/scales.js';
import {Worst} from '../map/worst.jsx';
import {chosen, figureNamed, PARTS} from '../records.js';
import {dark} from '../theme.js';

export function MapView() {
  const figure = figureNamed(currentFigure());
  const parts = Object.keys(PARTS).filter((part) => chosen.value[part]);
  const {samples, error} = useSamples(figure.name, parts);
  const there = parts.filter((part) => samples[part]);
  // Drawn anew only where something else is to be seen.
  const seen = [figure.name, dark.value, at('layer'), at('role'), cells.value, ...Object.keys(PARTS).map((part) => samples[part])];
  const maps = useMemo(() => <Maps figure={figure} parts={there} samples={samples} />, seen);
  return (
    <>
      <div class="controls"><Figure /><Steps /></div>
      {error && <Problem error={error} />}
      {there.length ? maps : !error && <p class="soft" role="status">Reading the record …</p>}
    </>
  );
}

function Maps({figure, parts, samples}) {
  const {unit, worse} = figure;
  const scale = scaleOf(figure, parts.map((part) => samples[part].extent));
  const values = Object.fromEntries(parts.map((part) => [part, valuesOf(samples[part].of, worse)]));
  const apart = differencesOf(figure, samples);
  const difference = differenceOf(figure);
  return (
    <>
      <Legend scale={scale} unit={unit} label={figure.label} />
      <div class="side-by-side">
        {parts.map((part) => (
          <Panel
            key={part} name={part} title={`${PARTS[part].label} ${chosen.value[part]}, step ${samples[part].step}`}
            step={samples[part].step} values={values[part]} scale={scale} unit={unit} worse={worse}
          />
        ))}
        {apart && <Differences figure={figure} step={samples.run.step} values={apart} unit={difference.unit} />}
      </div>
      <Worst ordered={ordered(figure, samples)} parts={parts} unit={unit} difference={apart && difference.unit} />
    </>
  );
}

function Differences({figure, step, values, unit}) {
  const scale = scaleOfDifferences(figure, values.map((one) => one.value));
  return (
    <div>
      <Panel name="difference" title={`Difference: ${chosen.value.run} against ${chosen.value.good}`} step={step} values={values} scale={scale} unit={unit} worse={figure.worse} />
      <Legend scale={scale} unit={unit} label="difference" />
    </div>
  );
}

/** Of run and good run, where both are there and of one step or close. */
function differencesOf(figure, {run, good}) {
  if (!run || !good) return null;
  const {of} = differenceOf(figure);
  return valuesOf((layer, role) => of(run.of(layer, role), good.of(layer, role)), figure.worse);
}

/** All tensors, the worst first: by what sets them apart where that is known. */
function ordered(figure, samples) {
  const {of} = differenceOf(figure);
  const rows = cells.value.tensors.map((tensor) => {
    const by = Object.fromEntries(Object.entries(samples).map(([part, sample]) => [part, sample ? sample.of(tensor.layer, tensor.role) : NaN]));
    const apart = samples.good ? of(by.run, by.good) : NaN;
    return {tensor, by, apart, sort: figure.worse * (samples.good ? apart : by.run)};
  });
  return rows.filter((row) => !Number.isNaN(row.sort)).sort((a, b) => b.sort - a.sort);
}
