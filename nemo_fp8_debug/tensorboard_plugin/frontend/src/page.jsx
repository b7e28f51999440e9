// What the script runs: the tab in TensorBoard's frame, the same page by itself, a report, or a figure of one.
import {render as mount} from 'preact';
import {App} from './app.jsx';
import {figure, page} from './host.js';
import {Figure} from './report/figure.jsx';
import {Report} from './report/report.jsx';
import {styled} from './styles.js';

if (figure) mount(<Figure />, figure.element);
else {
  document.documentElement.lang = 'en';
  styled();
  mount(page?.report ? <Report {...page.report} /> : <App />, document.body);
}
