// What a map shows in each of its places.
import {tensor} from '../address.js';
import {cells} from './cells.js';

/**
 * The places with their values: {column, row, tensor, value, number, tensors}; of several tensors in a place the worst.
 * @param {function} of a tensor's layer and role: its value, NaN where there is none
 * @param {function} badness of a number, more for worse
 * @param {function} numberOf layer, role and value: what is colored
 */
export function valuesOf(of, badness, numberOf = (layer, role, value) => value) {
  return cells.value.cells.map(([column, row, tensors]) => {
    let [worst, value, number] = [tensors[0], NaN, NaN];
    for (const one of tensors) {
      const mine = of(one.layer, one.role);
      const its = numberOf(one.layer, one.role, mine);
      if (Number.isNaN(value) || (!Number.isNaN(its) && !(badness(its) <= badness(number)))) [worst, value, number] = [one, mine, its];
    }
    return {column, row, tensor: worst, value, number, tensors};
  });
}

/** The worst of values; null where there is none. */
export const worstOf = (values, badness) =>
  values.reduce((worst, one) => (Number.isNaN(one.number) || (worst && badness(one.number) <= badness(worst.number)) ? worst : one), null);

/** Whether the tensor that is looked at is in this place. */
export const isChosen = ({tensors}) => tensors.some(({layer, role}) => layer === tensor.value?.layer && role === tensor.value?.role);
