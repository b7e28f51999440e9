// Answers of the Python server. Addresses are relative to this script, wherever the server puts it.
import {parsed} from './standing.js';

/** @param {string} base address that routes are relative to */
export function server(base) {
  const addressOf = (route, parameters) => {
    const url = new URL(route, base);
    for (const [name, value] of Object.entries(parameters)) if (value != null) url.searchParams.set(name, value);
    return url;
  };
  return {live: true, nameOf: (route, parameters) => String(addressOf(route, parameters)), answer: (route, parameters) => fetched(route, addressOf(route, parameters))};
}

async function fetched(route, url) {
  let response;
  try {
    response = await fetch(url);
  } catch {
    throw new Error('The server does not answer. Check that it still runs.');
  }
  if (response.ok) return parsed(route, await response.arrayBuffer());
  const said = await response.json().catch(() => ({}));
  throw new Error(said.error ?? `The server answered ${response.status} ${response.statusText}`);
}
