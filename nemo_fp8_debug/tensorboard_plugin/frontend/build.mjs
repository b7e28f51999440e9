// Builds ../static/page.js, one script for TensorBoard and for standalone pages. The same source always gives the same
// bytes.
import {build} from 'esbuild';

const folder = process.argv[2] ?? '../static';

// Build a classic script, because pages from file:// cannot load modules. The script defines a function that makes a page. A
// standalone page calls this function at once, and a report calls it for each figure. TensorBoard calls it through the
// export that the tab's server appends.
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
