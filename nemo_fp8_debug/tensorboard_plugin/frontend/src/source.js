// Where answers come from: the server beside this page, or data that stands in it.
import {page} from './host.js';
import {server} from './sources/server.js';
import {standing} from './sources/standing.js';

/**
 * {live, answer, nameOf}: whether a server answers, what is answered to a route and its parameters (a promise), and the name
 * under which an answer is kept.
 */
export const source = page ? standing(page) : server(import.meta.url);
