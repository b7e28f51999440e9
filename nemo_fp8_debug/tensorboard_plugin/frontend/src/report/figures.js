// The figures of a report. Each figure runs this script again, with its own state instead of an address.

const idOf = ({view, run, layer, role}) => `figure ${JSON.stringify([view, run, layer, role].map((part) => part ?? ''))}`;
const anchorOf = (state) => encodeURIComponent(idOf(state));

/** Return the element of the figure that shows a state: with the same tensor, or else with the same view. */
function placeOf(state) {
  const {view, run} = state;
  return document.getElementById(idOf(state)) ?? document.getElementById(idOf({view, run}));
}

export {idOf};

/** Return a figure {element, state, goTo, linkTo}: its element, what it shows, and functions for its links. */
export const figureOf = (element, state) => ({
  element, state,
  goTo: (next) => placeOf(next)?.scrollIntoView(),
  linkTo: (next) => `#${anchorOf(next)}`,
});
