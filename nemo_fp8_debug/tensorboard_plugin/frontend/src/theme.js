// Colors, light or dark like TensorBoard, and color scales that color-blind people can read.
import {signal} from '@preact/signals';
import {host} from './host.js';

/** Whether TensorBoard has a dark theme, or the system outside TensorBoard. */
export const dark = signal(false);

/**
 * Colors of Okabe and Ito, distinct in every common kind of color blindness. On dark ground, we use their sky blue, because
 * lines need a contrast of 3:1.
 */
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
// For printing, use light colors and the width that styles.css sets for printed pages.
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
 * TensorBoard's palette of runs in its order, each for light and for dark ground. We changed the brightness if a line would
 * have a contrast below 3:1. After the last color, the palette repeats.
 */
const OF_RUNS = [['#425066', '#8e98a3'], ['#109fb3', '#12b5cb'], ['#e52592', '#e52592'], ['#c28500', '#f9ab00'], ['#9334e6', '#a353ea'], ['#6fa03b', '#7cb342'], ['#e8710a', '#e8710a']];

/** Return the color of a run if more than three runs are shown, by the run's index in TensorBoard's order. */
export const colorAt = (place) => OF_RUNS[place % OF_RUNS.length][dark.value ? 1 : 0];

/** The runs also differ in their strokes. */
export const STROKES = {run: 'solid', baseline: 'dashed', reference: 'dotted'};

/** Cividis (Nunez, Anderton, Renslow 2018), nine of its colors. */
export const SEQUENTIAL = ['#00224e', '#123570', '#3b496c', '#575d6d', '#707173', '#8a8678', '#a59c74', '#c3b369', '#fee838'];
// ColorBrewer's PuOr, reversed, so that orange is worse. On dark ground, colors get brighter with the distance from 0.
const ON_LIGHT = ['#542788', '#8073ac', '#b2abd2', '#d8daeb', '#f7f7f7', '#fee0b6', '#fdb863', '#e08214', '#b35806'];
const ON_DARK = ['#d8daeb', '#b2abd2', '#8073ac', '#5b4c8a', '#3d3d42', '#7f4d14', '#b35806', '#e08214', '#fee0b6'];

/** Return the colors from better, over no difference, to worse. */
export const diverging = () => (dark.value ? ON_DARK : ON_LIGHT);

/** Return the colors of text, lines and ground in charts. */
export const inks = () =>
  dark.value
    ? {text: '#e3e7ea', soft: '#a3adb5', line: '#465059', ground: '#303030', empty: '#3a3f44'}
    : {text: '#1d2329', soft: '#5c6670', line: '#d5dade', ground: '#ffffff', empty: '#eceff1'};
