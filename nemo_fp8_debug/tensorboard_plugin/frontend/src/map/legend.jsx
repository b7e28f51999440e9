// What the colors of a map stand for.
import {number} from '../units.js';

export function Legend({scale, unit, label}) {
  const shares = [0, 0.5, 1];
  const value = (share) => number(scale.from(scale.low + share * (scale.high - scale.low)));
  return (
    <div class="legend" role="img" aria-label={`Colors: ${label}, from ${value(0)} to ${value(1)} ${unit}`}>
      <span class="soft">{unit ? `${label} (${unit})` : label}</span>
      <span class="ramp" style={{background: `linear-gradient(90deg, ${scale.colors.join(', ')})`}} />
      <span class="ticks">{shares.map((share) => <span key={share}>{value(share)}</span>)}</span>
    </div>
  );
}
