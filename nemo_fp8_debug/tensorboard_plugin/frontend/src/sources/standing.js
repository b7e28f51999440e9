// Answers from data that stands in the page, or beside it as scripts: file:// has no fetch.
import {parsed} from './parsed.js';
import {NEAR} from './near.js';

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
    script.onerror = () => failed(new Error(`${file} cannot be read: is the folder complete?`));
    document.head.append(script);
  });
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'))).arrayBuffer();
}
