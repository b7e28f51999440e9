// The figures of a report: each is this script once more, with a state of its own instead of an address.

const idOf = ({view, run, layer, role}) => `figure ${JSON.stringify([view, run, layer, role].map((part) => part ?? ''))}`;
const anchorOf = (state) => encodeURIComponent(idOf(state));

/** The figure that shows a state: of its tensor, if there is one, else of its view. */
function placeOf(state) {
  const {view, run} = state;
  return document.getElementById(idOf(state)) ?? document.getElementById(idOf({view, run}));
}

export {idOf};

/** {element, state, goTo, linkTo}: where a figure is drawn, what it shows, and where its links lead. */
export const figureOf = (element, state) => ({
  element, state,
  goTo: (next) => placeOf(next)?.scrollIntoView(),
  linkTo: (next) => `#${anchorOf(next)}`,
});
