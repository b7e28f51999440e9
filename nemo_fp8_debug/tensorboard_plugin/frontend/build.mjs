// Builds ../static/index.js for TensorBoard and ../static/page.js for pages of their own; the same bytes from the same source.
import {build} from 'esbuild';

const folder = process.argv[2] ?? '../static';
const common = {
  bundle: true,
  target: 'es2022',
  minify: true,
  charset: 'utf8',
  jsx: 'automatic',
  jsxImportSource: 'preact',
  loader: {'.css': 'text', '.md': 'text'},
  legalComments: 'inline',
  logLevel: 'warning',
};

await build({...common, entryPoints: ['src/index.jsx'], outfile: `${folder}/index.js`, format: 'esm'});
// A script of the classic kind, which file:// can load: a function that makes a page, called for the page itself and by a
// report for each of its figures.
await build({
  ...common,
  entryPoints: ['src/page.jsx'],
  outfile: `${folder}/page.js`,
  format: 'iife',
  define: {'import.meta.url': 'document.currentScript.src'},
  banner: {js: 'globalThis.fp8Debug = (fp8Figure) => {'},
  footer: {js: '};\nfp8Debug(null);'},
});
