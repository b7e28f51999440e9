// What a map shows in each of its places.
import {tensor} from '../address.js';
import {cells} from './cells.js';

/**
 * The places with their values: {column, row, tensor, value, tensors}; of several tensors in a place the worst.
 * @param {function} of a tensor's layer and role: its value, NaN where there is none
 * @param {function} badness of a value, more for worse
 */
export function valuesOf(of, badness) {
  return cells.value.cells.map(([column, row, tensors]) => {
    let [worst, value] = [tensors[0], NaN];
    for (const one of tensors) {
      const mine = of(one.layer, one.role);
      if (!Number.isNaN(mine) && !(badness(mine) <= badness(value))) [worst, value] = [one, mine];
    }
    return {column, row, tensor: worst, value, tensors};
  });
}

/** The worst of values; null where there is none. */
export const worstOf = (values, badness) =>
  values.reduce((worst, one) => (Number.isNaN(one.value) || (worst && badness(one.value) <= badness(worst.value)) ? worst : one), null);

/** Whether the tensor that is looked at is in this place. */
export const isChosen = ({tensors}) => tensors.some(({layer, role}) => layer === tensor.value?.layer && role === tensor.value?.role);
