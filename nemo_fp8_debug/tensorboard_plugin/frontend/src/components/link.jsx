// Links to other states of the page: followed in place, or opened in a tab of their own as links are.
import {go, linkTo} from '../address.js';

/**
 * @param {object} to changes of the address, as for `go`
 * @param {?string} label what is said of it, where that is not what is shown
 */
export function Link({to, label, children, ...more}) {
  const follow = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    go(to, true);
  };
  return <a href={linkTo(to)} target="_parent" aria-label={label} onClick={follow} {...more}>{children}</a>;
}
