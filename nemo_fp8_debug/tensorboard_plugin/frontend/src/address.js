// The state of the page, kept in TensorBoard's hash, such as #fp8&p.fp8.view=map&p.fp8.run=bad. A link restores this state.
import {computed, signal} from '@preact/signals';
import {figure, host} from './host.js';

const PREFIX = 'p.fp8.';

function parts() {
  return host.location.hash.replace(/^#/, '').split('&').filter(Boolean);
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function read() {
  if (figure) return figure.state;
  const state = {};
  for (const part of parts()) {
    const at = part.indexOf('=');
    const key = decoded(part.slice(0, Math.max(at, 0)));
    if (key.startsWith(PREFIX)) state[key.slice(PREFIX.length)] = decoded(part.slice(at + 1));
  }
  return state;
}

// Browsers allow about 200 changes of the address in 10 s. Dragging would exceed this limit, so we write less often.
const WRITE_MS = 100;
let waiting;
let written = -WRITE_MS;
const state = signal(read());
host.addEventListener('hashchange', () => {
  clearTimeout(waiting);
  waiting = undefined;
  state.value = read();
});

/** The value of a key, or undefined if the address does not have the key. */
export const at = (key) => state.value[key];

/** The selected step, or null for the last step. */
export const step = computed(() => {
  const value = Number.parseInt(at('step') ?? '', 10);
  return Number.isSafeInteger(value) && value >= 0 ? value : null;
});

/** The selected tensor {layer, role}, or null if none is selected. */
export const tensor = computed(() => (at('layer') && at('role') ? {layer: at('layer'), role: at('role')} : null));

/** Changes that reset what the user tries on a tensor: the scale, margin and format of the cast, and the call. */
const NO_TRIAL = {scale: null, margin: null, format: null, call: null};

/**
 * Return changes for `go` that select a tensor. If another tensor was selected, the changes also reset what was tried on it.
 * @param {{layer: string, role: string}} picked
 * @param {Object<string, string|number|null>} more changes
 */
export function toTensor({layer, role}, more = {}) {
  const same = layer === at('layer') && role === at('role');
  return {...(same ? {} : NO_TRIAL), layer, role, ...more};
}

function write(how) {
  clearTimeout(waiting);
  waiting = undefined;
  written = performance.now();
  if (figure) return;
  const others = parts().filter((part) => !decoded(part).startsWith(PREFIX));
  const ours = Object.entries(state.value).map(([key, value]) => `${PREFIX}${encodeURIComponent(key)}=${encodeURIComponent(value)}`);
  const hash = `#${[...others, ...ours].join('&')}`;
  // Write the full address, because TensorBoard's page of a plugin has another base address.
  const {pathname, search} = host.location;
  try {
    if (hash !== host.location.hash) host.history[how](host.history.state, '', pathname + search + hash);
  } catch {
    // In a sandboxed frame, in which another site may show the page, the address cannot change.
  }
}

function changed(changes) {
  const next = {...state.value};
  for (const [key, value] of Object.entries(changes)) {
    if (value == null) delete next[key];
    else next[key] = String(value);
  }
  return next;
}

/**
 * Change the state of the page and the address.
 * @param {Object<string, string|number|null>} changes values by key; null removes the key
 * @param {boolean} remember whether the browser's back button returns to the present state
 */
export function go(changes, remember = false) {
  const next = changed(changes);
  if (figure && next.view !== state.value.view) {
    figure.goTo(next);
    return;
  }
  if (remember && waiting) write('replaceState');
  state.value = next;
  if (remember) write('pushState');
  else if (performance.now() - written >= WRITE_MS) write('replaceState');
  else waiting ??= setTimeout(write, WRITE_MS, 'replaceState');
}

/** Return the address of another state. The changes are the same as for `go`. */
export function linkTo(changes) {
  if (figure) return figure.linkTo(changed(changes));
  const url = new URL(host.location.href);
  const others = parts().filter((part) => !decoded(part).startsWith(PREFIX));
  const ours = Object.entries({...state.value, ...changes}).filter(([, value]) => value != null);
  url.hash = [...others, ...ours.map(([key, value]) => `${PREFIX}${encodeURIComponent(key)}=${encodeURIComponent(value)}`)].join('&');
  return url.href;
}
