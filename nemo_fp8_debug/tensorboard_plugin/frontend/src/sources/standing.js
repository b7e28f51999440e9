// Answers from data in the page, or in scripts next to the page, because pages from file:// cannot fetch files.
import {placeOf} from '../units.js';

// The form in which answers are sent and stored: JSON, or a header and a float32 table.
/** Routes whose answers are tables of float32. */
const PACKED = new Set(['frames', 'course', 'spread']);

/** @param {ArrayBuffer} bytes */
export const parsed = (route, bytes) => (PACKED.has(route) ? tableOf(bytes) : JSON.parse(new TextDecoder().decode(bytes)));

/** Parse a table: a header, and float32 values in the shape that the header defines. NaN means no value. */
function tableOf(bytes) {
  const length = new DataView(bytes).getUint32(0, true);
  const about = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  return {...about, values: new Float32Array(bytes, 4 + length)};
}

// Answers to questions that are not stored under their own name: a part of a larger answer, or the answer at the nearest
// step.
const TENSOR_TABLES = ['metrics', 'states', 'activations'];

/**
 * For each route, a function of the parameters that returns an answer or null. `find` returns the stored answer of a route
 * and parameters, or null.
 */
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

  // The stored answer has all steps, so return it for any range.
  course: ({from, to, columns, ...about}, find) => find('course', about),
  histogram: ({step, ...tensor}, find) => atStep('histogram', step, tensor, find),
  others: ({step, ...about}, find) => atStep('others', step, about, find),
  // Names are stored for all runs whose names differ, so no names differ here.
  names: async () => ({names: {}, how: ''}),
};

/** Return the nearest of the answers at several steps, which are stored together. */
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

/** Return a tensor's metrics from the metrics of all tensors. These do not contain how the tensor was cast. */
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
/** Return a float32 value with as many digits as float32 has. */
const exact = (value) => (Number.isFinite(value) ? Number(value.toPrecision(7)) : null);

/** Return the name of an answer, the same as in page/contents.py. */
export function nameOf(route, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value != null).sort(([a], [b]) => (a < b ? -1 : 1));
  return `${route}?${given.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join('&')}`;
}

/**
 * @param {{held: Object<string, string>, files: Object<string, string>, missing: string}} page `held`: answers by name,
 *   compressed by gzip and encoded in base64. `files`: scripts with further answers, by name. `missing`: message for answers
 *   that are not in the page.
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

/** Run a script that adds its answers to the page. */
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
