// The words of docs/glossary.md, which comes with the page: sections of terms and what they mean.
import page from '../../../../../docs/glossary.md';

const ROW = /^\| (?!term \||-)(.+?) \| (.+) \|$/;

/** Links of the documentation say what they link to: the page has no other pages. */
const plain = (text) => text.replace(/\[([^\]]+)\]\([^)]*\)/g, '$1');

/** [{title, words: [{term, meaning}]}] in the order of the page. */
export const SECTIONS = page.split(/^## /m).slice(1).map((section) => ({
  title: section.slice(0, section.indexOf('\n')),
  words: section.split('\n').map((line) => ROW.exec(line)).filter(Boolean).map(([, term, meaning]) => ({term, meaning: plain(meaning)})),
}));

/** Sections whose words have a text, whatever its case; an empty text is in all. */
export function withText(text) {
  const sought = text.trim().toLowerCase();
  const has = ({term, meaning}) => `${term} ${meaning}`.toLowerCase().includes(sought);
  return SECTIONS.map(({title, words}) => ({title, words: words.filter(has)})).filter(({words}) => words.length);
}
