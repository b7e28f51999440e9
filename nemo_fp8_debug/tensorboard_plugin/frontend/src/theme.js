// Colors: light or dark as TensorBoard is, and scales that color-blind people can read.
import {signal} from '@preact/signals';
import {host} from './host.js';

/** Whether TensorBoard, or else the system, is dark. */
export const dark = signal(false);

/** Okabe and Ito's, apart for every common kind of color blindness. On dark ground their sky blue, since lines need 3:1. */
export const COLORS = {
  run: '#d55e00',
  baseline: '#009e73',
  mark: '#cc79a7',
  get reference() {
    return dark.value ? '#56b4e9' : '#0072b2';
  },
};

const media = window.matchMedia('(prefers-color-scheme: dark)');
const {body} = host.document;

function look() {
  show(host === window ? media.matches : body.classList.contains('dark-mode'));
}

function show(isDark) {
  dark.value = isDark;
  document.documentElement.dataset.theme = dark.value ? 'dark' : 'light';
  for (const part of ['run', 'baseline', 'reference']) document.documentElement.style.setProperty(`--${part}`, COLORS[part]);
}

look();
media.addEventListener('change', look);
// Paper is white, and as wide as styles.css says of a page that is printed.
window.addEventListener('beforeprint', () => {
  document.documentElement.dataset.printed = '';
  show(false);
});
window.addEventListener('afterprint', () => {
  delete document.documentElement.dataset.printed;
  look();
});
new MutationObserver(look).observe(body, {attributes: true, attributeFilter: ['class']});

/**
 * TensorBoard's palette of runs in its order, on light and on dark ground, darker or lighter where a line would have less
 * than 3:1; it goes on from the beginning after the last.
 */
const OF_RUNS = [['#425066', '#8e98a3'], ['#109fb3', '#12b5cb'], ['#e52592', '#e52592'], ['#c28500', '#f9ab00'], ['#9334e6', '#a353ea'], ['#6fa03b', '#7cb342'], ['#e8710a', '#e8710a']];

/** The color of a run where more than three are shown, by its place in TensorBoard's order. */
export const colorAt = (place) => OF_RUNS[place % OF_RUNS.length][dark.value ? 1 : 0];

/** Also told apart by their strokes. */
export const STROKES = {run: 'solid', baseline: 'dashed', reference: 'dotted'};

/** Cividis (Nunez, Anderton, Renslow 2018), nine of its colors. */
export const SEQUENTIAL = ['#00224e', '#123570', '#3b496c', '#575d6d', '#707173', '#8a8678', '#a59c74', '#c3b369', '#fee838'];
// ColorBrewer's PuOr, turned round: orange is worse; and the same on dark ground, where it is brighter the farther from 0.
const ON_LIGHT = ['#542788', '#8073ac', '#b2abd2', '#d8daeb', '#f7f7f7', '#fee0b6', '#fdb863', '#e08214', '#b35806'];
const ON_DARK = ['#d8daeb', '#b2abd2', '#8073ac', '#5b4c8a', '#3d3d42', '#7f4d14', '#b35806', '#e08214', '#fee0b6'];

/** From better over no difference to worse. */
export const diverging = () => (dark.value ? ON_DARK : ON_LIGHT);

/** What charts are drawn with. */
export const inks = () =>
  dark.value
    ? {text: '#e3e7ea', soft: '#a3adb5', line: '#465059', ground: '#303030', empty: '#3a3f44'}
    : {text: '#1d2329', soft: '#5c6670', line: '#d5dade', ground: '#ffffff', empty: '#eceff1'};
