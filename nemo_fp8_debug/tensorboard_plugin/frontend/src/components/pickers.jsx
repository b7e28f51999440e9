// Controls to choose runs, the metric and the tensor.
import {at, go, tensor, toTensor} from '../address.js';
import {details} from '../details.js';
import {Help} from '../glossary/glossary.jsx';
import {about, choose, chosen, known, metricNamed, metricsOfTable, PARTS, suggestedMetric, table, TABLES} from '../records.js';
import {shown, titleOf} from '../units.js';
import {Typed} from './basics.jsx';

const STATES = {growing: 'growing', empty: 'nothing recorded yet', unreadable: 'unreadable', still: ''};

export function Runs() {
  return (
    <div class="pickers">
      {Object.entries(PARTS).map(([part, {label, hint}]) => (
        <label key={part} title={hint}>
          <span class={`swatch ${part}`} aria-hidden="true" /> {label}
          <select value={chosen.value[part] ?? ''} onChange={(event) => choose(part, event.target.value)} data-part={part}>
            {part !== 'run' && <option value="">none</option>}
            {known.value.runs.map((run) => (
              <option key={run.name} value={run.name}>{[run.name, STATES[run.state]].filter(Boolean).join(' · ')}</option>
            ))}
          </select>
        </label>
      ))}
      <Growing />
      <Help />
    </div>
  );
}

function Growing() {
  const run = about(chosen.value.run);
  if (run?.state !== 'growing') return null;
  return <span class="soft" role="status">growing, at step {run.last ?? '-'}</span>;
}

export const DEFAULT_METRIC = 'underflow_pct';

/** Return the selected metric, or else the metric of the verdict when it is known, or else the default. */
export const currentMetric = () => [at('metric'), suggestedMetric()].find((name) => metricsOfTable().some((metric) => metric.name === name)) ?? DEFAULT_METRIC;

export function Metric() {
  return (
    <>
      <label>
        Metric
        <select value={currentMetric()} onChange={(event) => go({metric: event.target.value})} data-picker="metric">
          {metricsOfTable().map((metric) => (
            <option key={metric.name} value={metric.name}>{metric.unit ? `${metric.label} (${metric.unit})` : metric.label}</option>
          ))}
        </select>
        {!at('metric') && suggestedMetric() === currentMetric() && <span class="soft" role="status">the metric of the first tensor out of band</span>}
      </label>
      <Help word={metricNamed(currentMetric()).label.replace(', in the units of the loss', '')} />
    </>
  );
}

/** The choice of the table of tensors, if the run recorded more than operands. */
export function Table() {
  const there = new Set(Object.values(details.value).flatMap(({data}) => data?.tables ?? []));
  if (there.size < 2) return null;
  return (
    <label>
      Tensors
      <select value={table.value} onChange={(event) => go({table: event.target.value, layer: null, role: null}, true)} data-picker="table">
        {Object.entries(TABLES).filter(([name]) => there.has(name)).map(([name, label]) => <option key={name} value={name}>{label}</option>)}
      </select>
    </label>
  );
}

/**
 * The choice of a tensor of the selected run. The user can type a part of its name.
 * @param {?object} first tensor that is shown while no tensor is selected
 */
export function Tensor({first}) {
  const tensors = details.value.run?.data?.tensors;
  const names = tensors ? tensors.layer.map((layer, i) => titleOf({layer, role: tensors.role[i]})) : [];
  const pick = (event) => {
    const place = names.indexOf(event.target.value);
    if (place >= 0) go(toTensor({layer: tensors.layer[place], role: tensors.role[place]}));
  };
  return (
    <label class="wide-label">
      Tensor
      <Typed list="tensors" value={tensor.value ? titleOf(tensor.value) : ''} placeholder={first ? titleOf(first) : `${shown('input')} of …`} onChange={pick} data-picker="tensor" />
      <datalist id="tensors">{names.map((name) => <option key={name} value={name} />)}</datalist>
    </label>
  );
}
