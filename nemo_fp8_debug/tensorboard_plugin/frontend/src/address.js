// What is looked at, in the address: TensorBoard's hash, as #fp8&p.fp8.view=map&p.fp8.run=bad, so that a link shows the same.
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

// Browsers refuse an address that changes more than some 200 times in 10 s, as it would while something is dragged.
const WRITE_MS = 100;
let waiting;
let written = -WRITE_MS;
const state = signal(read());
host.addEventListener('hashchange', () => {
  clearTimeout(waiting);
  waiting = undefined;
  state.value = read();
});

/** The value of a key; undefined where the address has none. */
export const at = (key) => state.value[key];

/** The step that is looked at; null: the last one. */
export const step = computed(() => {
  const value = Number.parseInt(at('step') ?? '', 10);
  return Number.isSafeInteger(value) && value >= 0 ? value : null;
});

/** The tensor that is looked at, {layer, role}; null: none. */
export const tensor = computed(() => (at('layer') && at('role') ? {layer: at('layer'), role: at('role')} : null));

/** What is tried on a tensor: of the calls, which one; and how it is cast. */
const NO_TRIAL = {scale: null, margin: null, format: null, call: null};

/**
 * Changes, as for `go`, that look at a tensor: what was tried on another one is not tried on it.
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
  // In full: TensorBoard's page of a plugin has another base.
  const {pathname, search} = host.location;
  try {
    if (hash !== host.location.hash) host.history[how](host.history.state, '', pathname + search + hash);
  } catch {
    // A sandboxed frame, as others show a page in, has no address that could change.
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
 * Look at something else; the address follows.
 * @param {Object<string, string|number|null>} changes null takes a key out
 * @param {boolean} remember whether the browser's back button comes back to what is looked at now
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

/** The address under which something else is looked at; changes as for `go`. */
export function linkTo(changes) {
  if (figure) return figure.linkTo(changed(changes));
  const url = new URL(host.location.href);
  const others = parts().filter((part) => !decoded(part).startsWith(PREFIX));
  const ours = Object.entries({...state.value, ...changes}).filter(([, value]) => value != null);
  url.hash = [...others, ...ours.map(([key, value]) => `${PREFIX}${encodeURIComponent(key)}=${encodeURIComponent(value)}`)].join('&');
  return url.href;
}
