// Which metrics are looked at over the steps.
import '@preact/signals';
import {at, go} from '../address.js';
import {metricNamed, metricsOfTable} from '../records.js';

const DEFAULT = 'underflow_pct,relative_error,amax,scale_ratio_log2';

/** What a run tells of its steps, sampled or not; sparse: of some of them only. */
const OF_THE_RUN = {
  loss: {label: 'loss', unit: '', scale: 'linear'},
  grad_norm: {label: 'gradient norm', unit: '', scale: 'log', sparse: true},
  lr: {label: 'learning rate', unit: '', scale: 'linear', sparse: true},
};

export const ofTheRun = (name) => name in OF_THE_RUN;
export const aboutMetric = (name) => OF_THE_RUN[name] ?? metricNamed(name);

const offered = () => [...metricsOfTable().map(({name}) => name), 'grad_norm', 'lr'];

/** Names of metrics, as the address has them, in the order that they are offered in. */
export function chosenMetrics() {
  const wanted = new Set((at('metrics') ?? DEFAULT).split(','));
  return offered().filter((name) => wanted.has(name));
}

export function Metrics({metrics}) {
  const set = (name, on) => go({metrics: offered().filter((one) => (one === name ? on : metrics.includes(one))).join(',')});
  return (
    <details class="choices">
      <summary>{metrics.length} metrics: {metrics.map((name) => aboutMetric(name).label).join(', ') || 'none'}</summary>
      <fieldset class="controls">
        <legend class="soft">Metrics, each with a chart of its own</legend>
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
