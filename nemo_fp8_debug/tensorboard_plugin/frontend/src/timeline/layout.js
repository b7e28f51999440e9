// Where the charts over the steps are: one below the other, or those of the run beside those of the tensor in a wide window.

const [LEFT, RIGHT] = [70, 24];
const TITLE = 25;
const GAP = 40;
/** A line of labels above the first chart of a column. */
export const LABEL = 15;
const BOTTOM = 76;
const [LEAST, MOST] = [110, 320];
const WIDE = 1700;

/**
 * @param {Array} panels those of the run first
 * @param {number} width of all
 * @param {number} room height that the window has for them
 * @param {number} labels above the first chart
 * @returns {{height: number, boxes: Array<{left, width, top, height, isFirst, isLast}>}} a box for each panel
 */
export function layoutOf(panels, width, room, labels) {
  const columns = columnsOf(panels, width);
  const top = TITLE + labels * LABEL + 4;
  const most = Math.max(...columns.map((column) => column.length), 1);
  const each = Math.min(MOST, Math.max(LEAST, (room - top - BOTTOM - (most - 1) * GAP) / most));
  const tall = most * each + (most - 1) * GAP;
  const wide = width / columns.length;
  const boxes = columns.flatMap((column, c) => {
    const height = (tall - (column.length - 1) * GAP) / column.length;
    return column.map((_, i) => ({
      left: c * wide + LEFT, width: wide - LEFT - RIGHT, top: top + i * (height + GAP), height, isFirst: i === 0, isLast: i === column.length - 1,
    }));
  });
  return {height: Math.round(top + tall + BOTTOM), boxes};
}

function columnsOf(panels, width) {
  const groups = [panels.filter(({ofRun}) => ofRun), panels.filter(({ofRun}) => !ofRun)].filter((group) => group.length);
  return width >= WIDE && groups.length > 1 ? groups : [panels];
}
