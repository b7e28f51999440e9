// Links to other states of the page: followed in place, or opened in a tab of their own as links are.
import {go, linkTo, toTensor} from '../address.js';
import {titleOf} from '../units.js';
import {Breakable} from './breakable.jsx';

/**
 * @param {object} to changes of the address, as for `go`
 * @param {?string} label what is said of it, where that is not what is shown
 */
export function Link({to, label, children}) {
  const follow = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    go(to, true);
  };
  return <a href={linkTo(to)} target="_parent" aria-label={label} onClick={follow}>{children}</a>;
}

/** A tensor's name, which opens a view of it. @param {?number} step null: the step that is looked at stays */
export const TensorLink = ({layer, role, step, view = 'timeline', children}) => (
  <Link to={toTensor({layer, role}, {view, ...(step == null ? {} : {step})})}>{children ?? <Breakable text={titleOf({layer, role})} />}</Link>
);
