// What TensorBoard loads into the frame of the tab.
import {render as mount} from 'preact';
import {App} from './app.jsx';
import {styled} from './styles.js';

export function render() {
  document.documentElement.lang = 'en';
  styled();
  mount(<App />, document.body);
}
