// What is told at the pointer: all values there, of each run and of the band, and what happened.
import {withUnit} from '../units.js';
import {KINDS} from './happened.js';
import {bandAt, valuesAt} from './panels.js';

/** What counts as usual, in words: the ends of a band. */
export function bandTold(band, unit) {
  if (!band) return '';
  const ends = [band.low !== null && `from ${withUnit(band.low, unit)}`, band.high !== null && `up to ${withUnit(band.high, unit)}`];
  return ends.filter(Boolean).join(' ');
}

/** A value, and of which step it is where that is another one. */
export const valueTold = (found, unit, step) =>
  found === undefined ? '' : `${found.value === null ? 'not a number' : withUnit(found.value, unit)}${found.step === step ? '' : ` (step ${found.step})`}`;

/** Rows of texts: headings, then a row a panel. */
export function rowsAt(step, panels, names) {
  const parts = Object.keys(names).filter((part) => panels.some(({lines}) => lines.some((line) => line.part === part)));
  const banded = panels.some((panel) => bandAt(panel, step));
  return [
    [`step ${step}`, ...parts.map((part) => names[part]), ...(banded ? ['band'] : [])],
    ...panels.map((panel) => {
      const values = valuesAt(panel, step);
      return [panel.label, ...parts.map((part) => valueTold(values[part], panel.unit, step)), ...(banded ? [bandTold(bandAt(panel, step), panel.unit)] : [])];
    }),
  ];
}

const element = (tag, text, more = {}) => Object.assign(document.createElement(tag), {textContent: text, ...more});

/** The tooltip at a step; texts only, since ECharts takes strings for HTML. */
export function tipAt(step, panels, events, names) {
  const box = element('div', '', {className: 'tip'});
  const table = element('table', '');
  const [headings, ...rows] = rowsAt(step, panels, names);
  for (const cells of [headings, ...rows]) {
    const row = table.insertRow();
    cells.forEach((text, i) => row.append(element(cells === headings || i === 0 ? 'th' : 'td', text)));
  }
  box.append(table);
  for (const {kind, part, step: at, why} of events.filter((event) => event.step === step)) {
    box.append(element('div', `${KINDS[kind].label} in ${names[part]}, step ${at}: ${why}`));
  }
  return box;
}
