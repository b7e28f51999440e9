// Builds ../static/index.js; the same bytes from the same source, wherever it is done.
import {build} from 'esbuild';

await build({
  entryPoints: ['src/index.jsx'],
  outfile: process.argv[2] ?? '../static/index.js',
  bundle: true,
  format: 'esm',
  target: 'es2022',
  minify: true,
  charset: 'utf8',
  jsx: 'automatic',
  jsxImportSource: 'preact',
  loader: {'.css': 'text'},
  legalComments: 'inline',
  logLevel: 'warning',
});
