// What there is to say of a tensor in sentences.
import {metricNamed} from '../records.js';
import {withUnit} from '../units.js';

const apart = (step, other) => {
  const by = Math.abs(step - other);
  return by === 0 ? 'with the loss' : `${by} step${by === 1 ? '' : 's'} ${step < other ? 'before' : 'after'} the loss`;
};

/**
 * Whether a tensor is in the baseline's band, and since when not.
 * @param {?object} band answer of `band`
 * @param {?object} divergence answer of `divergence`
 * @param {string} baseline its name
 */
export function whetherInBand(band, divergence, baseline) {
  if (!band) return '';
  if (band.why) return band.why;
  if (band.since === null) return within(band, baseline);
  const {label, unit} = metricNamed(band.metric);
  const {usual, value} = band.metrics[band.metric];
  const lead = divergence?.since == null ? '' : `, ${apart(band.since, divergence.since)}`;
  const chance = band.chance ? ' By itself that is no more than chance does to one of so many tensors.' : '';
  return `Out of the band of ${baseline} since step ${band.since}${lead}: ${label} ${withUnit(usual, unit)} → ${withUnit(value, unit)}.${chance}`;
}

function within({metrics}, baseline) {
  const [name, most] = Object.entries(metrics).reduce((found, one) => (one[1].beyond > found[1].beyond ? one : found));
  if (!most.beyond) return `Within the band of ${baseline} at every sample.`;
  const why = most.counted ? 'too few in a row to count' : 'no more is lost than in the baseline, so that does not count';
  return `Within the band of ${baseline}, but for ${most.beyond} sample${most.beyond === 1 ? '' : 's'} of ${metricNamed(name).label}: ${why}.`;
}

/** Why a tensor is blamed or is not. @param {?object} row what the story tells of it @param {boolean} known whether there is a story */
export function whyTold(row, known) {
  if (row) return row.why;
  return known ? 'It is not among the tensors that matter.' : 'Whether it is to blame is not known yet.';
}
