// Millions of values as a few thousand: how many there are of each size, to 8 significant bits.

const [DROPPED, ENDLESS] = [16, 0x7f80];

/**
 * @param {Float32Array} numbers [rows, width]
 * @param {number} begin columns before it are left out
 * @returns {{values: Float32Array, counts: number[], most: number}} of finite numbers; `most` is the largest magnitude, exactly
 */
export function tallyOf(numbers, width, begin = 0) {
  const bits = new Uint32Array(numbers.buffer, numbers.byteOffset, numbers.length);
  const counts = new Uint32Array(1 << DROPPED);
  let most = 0;
  for (let row = 0; row < bits.length; row += width) {
    for (let i = row + begin; i < row + width; i += 1) {
      const magnitude = bits[i] & 0x7fffffff;
      if (magnitude >>> DROPPED >= ENDLESS) continue;
      counts[(bits[i] >>> DROPPED) + ((bits[i] >>> (DROPPED - 1)) & 1)] += 1; // rounded
      if (magnitude > most) most = magnitude;
    }
  }
  const codes = [...counts.keys()].filter((code) => counts[code] > 0);
  return {values: floats(codes.map((code) => code << DROPPED)), counts: codes.map((code) => counts[code]), most: floats([most])[0]};
}

const floats = (bits) => new Float32Array(Uint32Array.from(bits).buffer);
