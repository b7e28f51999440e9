// The picture of Course: drawn in pixels between axes; a click chooses, a drag zooms, arrow keys move.
import {useEffect, useMemo, useRef} from 'preact/hooks';
import {useSignal} from '@preact/signals';
import Image from 'zrender/lib/graphic/Image.js';
import Rect from 'zrender/lib/graphic/shape/Rect.js';
import {go, tensor, toTensor} from '../address.js';
import {Chart} from '../components/chart.jsx';
import {Under} from '../map/pointer.jsx';
import {COLORS, dark} from '../theme.js';
import {titleOf} from '../units.js';
import {cellAt, cellOf, moved, stepAt} from './cell.js';
import {LEFT, optionOf, placesOf, RIGHT} from './option.js';
import {painted} from './picture.js';

/** Pixels from which on a movement is a drag. */
const DRAG = 5;

/**
 * @param {object} data as of `useCourse`
 * @param {Array} multiples as of `multiplesOf`
 * @param {function} tell a cell in words
 * @param {number} step that is looked at
 */
export function CourseChart({data, multiples, lines, marks, span, scale, badness, names, tell, step, label, mark, rows}) {
  const box = useRef();
  const zr = useRef();
  const under = useSignal(null);
  const drag = useSignal(null);
  const places = useMemo(() => placesOf(lines, multiples), [lines, multiples, window.innerHeight]);
  const option = useMemo(() => optionOf({lines, multiples, places, span, marks, step, names}), [lines, multiples, places, JSON.stringify(span), JSON.stringify(marks), step, dark.value]);
  const cell = tensor.value && cellOf(data, multiples, tensor.value, step);
  const look = useRef();
  look.current = {data, multiples, places, span};

  const images = useMemo(() => [], [data, scale, multiples]);
  const repaint = () => {
    const chart = zr.current;
    if (!chart) return;
    const width = chart.chart.getWidth() - LEFT - RIGHT;
    if (width <= 0) return;
    multiples.forEach(({tensors}, i) => {
      const {top, height} = places.maps[i];
      if (images[i]?.wide !== width || images[i]?.high !== height) images[i] = {wide: width, high: height, image: painted(data, tensors, scale, badness, span, width, height, window.devicePixelRatio)};
      chart.pictures[i] ??= added(chart.chart, new Image({silent: true, zlevel: -1, style: {}}));
      chart.pictures[i].attr({style: {image: images[i].image, x: LEFT, y: top, width, height}});
    });
    const at = cell && outline(cell, {data, multiples, places, span}, width);
    chart.chosen.attr({invisible: !at, shape: at ?? {}});
  };
  const ready = (chart) => {
    const chosen = added(chart, new Rect({silent: true, invisible: true, z: 9, style: {fill: 'none', stroke: COLORS.mark, lineWidth: 2.5}}));
    zr.current = {chart, pictures: [], chosen};
    repaint();
  };
  useEffect(repaint);

  const placeOf = (event) => {
    const {left, top, width} = box.current.querySelector('.chart-box').getBoundingClientRect();
    return {x: event.clientX - left, y: event.clientY - top, width};
  };
  const inside = ({x, width}) => Math.min(width - RIGHT, Math.max(LEFT, x));
  const down = (event) => {
    const place = placeOf(event);
    if (event.target.tagName === 'CANVAS' && place.x >= LEFT && place.x <= place.width - RIGHT) drag.value = {from: place.x, to: place.x};
  };
  const move = (event) => {
    const place = placeOf(event);
    if (drag.value) drag.value = {...drag.value, to: inside(place)};
    under.value = event.target.tagName === 'CANVAS' && !drag.value ? place : null;
  };
  const up = (event) => {
    const dragged = drag.value;
    drag.value = null;
    if (!dragged) return;
    const place = placeOf(event);
    if (Math.abs(dragged.to - dragged.from) >= DRAG) {
      const ends = [dragged.from, dragged.to].map((x) => Math.round(stepAt(x, place.width, span))).sort((a, b) => a - b);
      if (ends[0] < ends[1]) go({from: ends[0], to: ends[1]}, true);
      return;
    }
    const found = cellAt(place, look.current);
    go(found ? toTensor(found.tensor, {step: found.step}) : {step: Math.round(stepAt(place.x, place.width, span))});
  };
  const keys = (event) => {
    if (event.target !== event.currentTarget) return;
    if (event.key === 'Enter' && tensor.value) go({view: 'timeline'}, true);
    const next = moved(data, multiples, cell, event.key);
    if (!next) return;
    event.preventDefault();
    go(toTensor(next.tensor, {step: next.step}));
  };
  const now = under.value && cellAt(under.value, look.current);
  return (
    <div ref={box} class="keyed" tabIndex={0} role="group" aria-label={`${label} Arrow keys move over the map, Enter opens the timeline.`} onKeyDown={keys}>
      <div class="pointed" onMouseDown={down} onMouseMove={move} onMouseUp={up} onMouseLeave={() => (under.value = drag.value = null)}>
        <Chart name="course" label={label} height={places.height} option={option} mark={mark} ready={ready} resized={repaint} rows={rows} />
        {drag.value && <div class="brush" style={{left: `${Math.min(drag.value.from, drag.value.to)}px`, width: `${Math.abs(drag.value.to - drag.value.from)}px`}} />}
        {now && <Under {...under.value}><b>{titleOf(now.tensor)}</b><br />{tell(now)}</Under>}
      </div>
      <span class="unseen" aria-live="polite">{cell ? `${titleOf(cell.tensor)}, ${tell(cell)}` : ''}</span>
    </div>
  );
}

function added(chart, element) {
  chart.getZr().add(element);
  return element;
}

/** Around a cell, in pixels of the chart; null outside of the span. */
function outline({panel, place, column}, {data: {course}, multiples, places, span: [from, to]}, width) {
  const {top, height} = places.maps[panel];
  const high = height / multiples[panel].tensors.length;
  const begin = LEFT + ((course.first[column] - from) / (to - from)) * width;
  const end = LEFT + (((course.first[column + 1] ?? course.first[column] + course.width) - from) / (to - from)) * width;
  if (begin < LEFT - 1 || begin > LEFT + width) return null;
  return {x: begin - 1, y: top + place * high - 1, width: Math.max(4, Math.min(end, LEFT + width) - begin), height: Math.max(4, high)};
}
