// The start of the script. It shows the tab in TensorBoard's frame, the same page standalone, a report, or a figure of a
// report.
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
