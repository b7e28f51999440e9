// Where the page stands: in TensorBoard's frame, in a window of its own, or as one figure of a report.
/* global fp8Figure */

/** What the report says of this figure, as of `figureOf` in report/figures.js; null: this is no figure. */
export const figure = typeof fp8Figure === 'undefined' ? null : fp8Figure;

/** The window whose address and colors are followed. The frame of a tab is of TensorBoard's origin. */
export const host = !figure && location.pathname.endsWith('/data/plugin_entry.html') ? window.parent : window;

/** Data that stands in the page, as of page/contents.py; undefined: a server answers. */
export const page = globalThis.fp8DebugPage;
