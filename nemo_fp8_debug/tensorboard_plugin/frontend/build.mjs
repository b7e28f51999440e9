// Builds ../static/page.js, one script for TensorBoard and for pages of their own; the same bytes from the same source.
import {build} from 'esbuild';

const folder = process.argv[2] ?? '../static';

// A script of the classic kind, which file:// can load: a function that makes a page. A page of its own calls it at once, a
// report for each of its figures, and TensorBoard through the export that the tab's server adds.
await build({
  entryPoints: ['src/page.jsx'],
  outfile: `${folder}/page.js`,
  bundle: true,
  format: 'iife',
  target: 'es2022',
  minify: true,
  charset: 'utf8',
  jsx: 'automatic',
  jsxImportSource: 'preact',
  loader: {'.css': 'text', '.md': 'text'},
  legalComments: 'inline',
  logLevel: 'warning',
  define: {'import.meta.url': 'fp8Base'},
  banner: {js: 'globalThis.fp8Debug = (fp8Figure, fp8Base) => {'},
  footer: {js: '};\nif (document.currentScript) fp8Debug(null, document.currentScript.src);'},
});
