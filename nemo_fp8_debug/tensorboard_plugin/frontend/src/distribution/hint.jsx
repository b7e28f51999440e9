// That the window can be dragged: said until somebody has done it, or has read it.
import {signal} from '@preact/signals';

const KEY = 'fp8.dragged';

// A page from a file, or one that may keep nothing, has no storage: it says so each time.
function kept() {
  try {
    return localStorage.getItem(KEY) === '1';
  } catch {
    return false;
  }
}

const known = signal(kept());

/** From now on it is known. */
export function wasDragged() {
  known.value = true;
  try {
    localStorage.setItem(KEY, '1');
  } catch {
    // Known as long as the page is open.
  }
}

export function DragHint() {
  if (known.value) return null;
  return (
    <p class="hint" data-words="drag">
      <span aria-hidden="true">⇔ </span>Drag the window by its handle, or move the Scale slider below, to try another scale.{' '}
      <button type="button" class="small" onClick={wasDragged}>Got it</button>
    </p>
  );
}
