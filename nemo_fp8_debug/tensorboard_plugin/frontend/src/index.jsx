// What TensorBoard loads into the frame of the tab.
import {render as mount} from 'preact';
import {App} from './app.jsx';
import ofStory from './story/story.css';
import styles from './styles.css';

export function render() {
  document.documentElement.lang = 'en';
  document.head.append(Object.assign(document.createElement('style'), {textContent: styles + ofStory}));
  mount(<App />, document.body);
}
