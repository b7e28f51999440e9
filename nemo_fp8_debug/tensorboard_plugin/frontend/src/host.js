// Where the page is shown: in TensorBoard's frame, in its own window, or as a figure of a report.
/* global fp8Figure */

/** The figure of a report, from `figureOf` in report/figures.js, or null if this page is not a figure. */
export const figure = typeof fp8Figure === 'undefined' ? null : fp8Figure;

/** The window whose address and colors the page uses. The frame of the tab has the same origin as TensorBoard. */
export const host = !figure && location.pathname.endsWith('/data/plugin_entry.html') ? window.parent : window;

/** Data that page/contents.py put into the page, or undefined if a server answers. */
export const page = globalThis.fp8DebugPage;
