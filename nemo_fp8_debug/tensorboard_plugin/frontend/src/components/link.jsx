// Links to other states of the page: followed in place, or opened in a tab of their own as links are.
import {go, linkTo} from '../address.js';

/** @param {object} to changes of the address, as for `go` */
export function Link({to, children, ...more}) {
  const follow = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    go(to, true);
  };
  return <a href={linkTo(to)} target="_parent" onClick={follow} {...more}>{children}</a>;
}
