// Answers as they are sent and kept: JSON, and float32 tables behind a header.

/** Routes whose answers are tables of float32. */
const TABLES = new Set(['frames', 'course', 'spread']);

/** @param {ArrayBuffer} bytes */
export const parsed = (route, bytes) => (TABLES.has(route) ? tableOf(bytes) : JSON.parse(new TextDecoder().decode(bytes)));

/** A header, and values: float32 as it says, NaN where there is none. */
function tableOf(bytes) {
  const length = new DataView(bytes).getUint32(0, true);
  const about = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  return {...about, values: new Float32Array(bytes, 4 + length)};
}
