// A view as a figure, without the controls around it.
import {useEffect} from 'preact/hooks';
import {Shown} from '../app.jsx';
import {Problem} from '../components/basics.jsx';
import {figure} from '../host.js';
import {known, look, unreachable} from '../records.js';
import {Headline} from '../story/headline.jsx';

export function Figure() {
  useEffect(() => {
    look();
  }, []);
  if (unreachable.value) return <Problem error={unreachable.value} />;
  if (!known.value) return null;
  const {view} = figure.state;
  return <>{view === 'verdict' && <Headline />}<Shown view={view} /></>;
}
