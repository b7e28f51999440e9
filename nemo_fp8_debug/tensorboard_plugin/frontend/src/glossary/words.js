// The terms of docs/glossary.md and their meanings, by section. The build puts this file into the page.
import page from '../../../../../docs/glossary.md';

const ROW = /^\| (?!term \||-)(.+?) \| (.+) \|$/;

/** Replace links of the documentation with their text, because their targets are not in this page. */
const plain = (text) => text.replace(/\[([^\]]+)\]\([^)]*\)/g, '$1');

/** The sections [{title, words: [{term, meaning}]}] in the order of the file. */
export const SECTIONS = page.split(/^## /m).slice(1).map((section) => ({
  title: section.slice(0, section.indexOf('\n')),
  words: section.split('\n').map((line) => ROW.exec(line)).filter(Boolean).map(([, term, meaning]) => ({term, meaning: plain(meaning)})),
}));

/** Return the sections with only the words that contain a text. Ignore case. An empty text keeps all words. */
export function withText(text) {
  const sought = text.trim().toLowerCase();
  const has = ({term, meaning}) => `${term} ${meaning}`.toLowerCase().includes(sought);
  return SECTIONS.map(({title, words}) => ({title, words: words.filter(has)})).filter(({words}) => words.length);
}
