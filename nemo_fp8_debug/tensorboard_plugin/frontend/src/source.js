// The source of answers: the page's server, or data in the page.
import {page} from './host.js';
import {server} from './sources/server.js';
import {standing} from './sources/standing.js';

/**
 * The source {live, answer, nameOf}. `live`: whether a server answers. `answer`: returns a promise of the answer to a route
 * and its parameters. `nameOf`: returns the name under which an answer is stored.
 */
export const source = page ? standing(page) : server(import.meta.url);
