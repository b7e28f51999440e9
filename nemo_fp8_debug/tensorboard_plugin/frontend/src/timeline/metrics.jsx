// The choice of metrics to show over the steps.
import '@preact/signals';
import {at, go} from '../address.js';
import {metricNamed, metricsOfTable} from '../records.js';

/** Scalars that a run records at all steps, sampled or not. Optional scalars are shown only if they were recorded. */
const OF_THE_RUN = {
  loss: {label: 'loss', unit: ''},
  lr: {label: 'learning rate', unit: '', optional: true},
  grad_norm: {label: 'gradient norm', unit: '', optional: true},
};

const DEFAULT = 'lr,grad_norm,underflow_pct,relative_error,amax,scale_ratio_log2';

export const ofTheRun = (name) => name in OF_THE_RUN;
export const aboutMetric = (name) => OF_THE_RUN[name] ?? metricNamed(name);

const offered = () => ['lr', 'grad_norm', ...metricsOfTable().map(({name}) => name)];

/** Return the names of the selected metrics, in the order of the choices. The loss is always first. */
export function chosenMetrics() {
  const wanted = new Set((at('metrics') ?? DEFAULT).split(','));
  return offered().filter((name) => wanted.has(name));
}

export function Metrics({metrics}) {
  const set = (name, on) => go({metrics: offered().filter((one) => (one === name ? on : metrics.includes(one))).join(',')});
  return (
    <details class="choices">
      <summary>Charts: the loss and {metrics.length} more</summary>
      <fieldset class="controls">
        <legend class="soft">In addition to the loss, one chart each</legend>
        {offered().map((name) => {
          const {label, unit} = aboutMetric(name);
          return (
            <label key={name}>
              <input type="checkbox" checked={metrics.includes(name)} onChange={(event) => set(name, event.target.checked)} data-metric-choice={name} />
              {unit ? `${label} (${unit})` : label}
            </label>
          );
        })}
      </fieldset>
    </details>
  );
}
