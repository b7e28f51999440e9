// Answers from data that stands in the page, or next to it as scripts: file:// has no fetch.
import {placeOf} from '../units.js';

// Answers as they are sent and kept: JSON, and float32 tables behind a header.
/** Routes whose answers are tables of float32. */
const PACKED = new Set(['frames', 'course', 'spread']);

/** @param {ArrayBuffer} bytes */
export const parsed = (route, bytes) => (PACKED.has(route) ? tableOf(bytes) : JSON.parse(new TextDecoder().decode(bytes)));

/** A header, and values: float32 as it says, NaN where there is none. */
function tableOf(bytes) {
  const length = new DataView(bytes).getUint32(0, true);
  const about = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  return {...about, values: new Float32Array(bytes, 4 + length)};
}

// What answers a question that is not held as it was asked: a part of a larger answer, or that of the nearest step.
const TENSOR_TABLES = ['metrics', 'states', 'activations'];

/** By route, {...} or null of parameters; `find` gives what is held under a route and parameters, or null. */
export const NEAR = {
  async frames({from, to, ...about}, find) {
    const whole = await find('frames', about);
    return whole && between(whole, from, to);
  },

  async timeline({metrics, ...tensor}, find) {
    const names = metrics.split(',');
    const whole = await find('timeline', tensor);
    if (whole) return {...whole, metrics: Object.fromEntries(names.map((name) => [name, whole.metrics[name]]))};
    return fromFrames(names, tensor, find);
  },

  // Steps that are not looked at are there beside the others.
  course: ({from, to, columns, ...about}, find) => find('course', about),
  histogram: ({step, ...tensor}, find) => atStep('histogram', step, tensor, find),
  others: ({step, ...about}, find) => atStep('others', step, about, find),
  // Names that differ are held of all runs that are in the page.
  names: async () => ({names: {}, how: ''}),
};

/** Of answers at several steps, which are held together, the nearest. */
async function atStep(route, step, about, find) {
  const all = await find(route, about);
  return all && all[placeOf(all.map((one) => one.step), step)];
}

function between(whole, from, to) {
  const width = whole.layer.length;
  const rows = whole.steps.flatMap((step, i) => (step >= from && step <= to ? [i] : []));
  const values = new Float32Array(rows.length * width);
  rows.forEach((row, i) => values.set(whole.values.subarray(row * width, (row + 1) * width), i * width));
  return {...whole, steps: rows.map((row) => whole.steps[row]), values};
}

/** A tensor's metrics out of those of all tensors; how it was cast is not in them. */
async function fromFrames(names, {run, layer, role}, find) {
  for (const table of TENSOR_TABLES) {
    const frames = await Promise.all(names.map((metric) => find('frames', {run, metric, table})));
    const first = frames.find(Boolean);
    const at = first?.layer.findIndex((name, i) => name === layer && first.role[i] === role) ?? -1;
    if (at < 0) continue;
    const rows = first.steps.flatMap((_, row) => (frames.some((one) => one && !Number.isNaN(valueIn(one, row, at))) ? [row] : []));
    const column = (one) => rows.map((row) => (one ? exact(valueIn(one, row, at)) : null));
    const unknown = rows.map(() => null);
    return {
      step: rows.map((row) => first.steps[row]), metrics: Object.fromEntries(names.map((name, i) => [name, column(frames[i])])),
      recipe: unknown, format: unknown, scale_source: unknown,
    };
  }
  return null;
}

const valueIn = (frames, row, column) => frames.values[row * frames.layer.length + column];
/** float32 in as many digits as it has. */
const exact = (value) => (Number.isFinite(value) ? Number(value.toPrecision(7)) : null);

/** As page/contents.py names answers. */
export function nameOf(route, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value != null).sort(([a], [b]) => (a < b ? -1 : 1));
  return `${route}?${given.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join('&')}`;
}

/**
 * @param {{held: Object<string, string>, files: Object<string, string>, missing: string}} page answers, gzip in base64, and
 *   scripts that hold more, by name; and what is said of what is not there
 */
export function standing({held, files = {}, missing}) {
  const loaded = new Map();
  const has = (name) => name in held || name in files;
  const read = async (route, name) => {
    if (!(name in held)) await (loaded.get(files[name]) ?? loaded.set(files[name], load(files[name])).get(files[name]));
    return parsed(route, await unpacked(held[name]));
  };
  const answer = async (route, parameters) => {
    const name = nameOf(route, parameters);
    if (has(name)) return read(route, name);
    const near = await NEAR[route]?.(parameters, (other, more) => (has(nameOf(other, more)) ? read(other, nameOf(other, more)) : null));
    if (near) return near;
    throw new Error(missing);
  };
  return {live: false, nameOf, answer};
}

/** Runs a script that adds what it holds. */
function load(file) {
  return new Promise((done, failed) => {
    const script = Object.assign(document.createElement('script'), {src: file});
    script.onload = done;
    script.onerror = () => failed(new Error(`${file} is unreadable. Check that the folder is complete.`));
    document.head.append(script);
  });
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'))).arrayBuffer();
}
