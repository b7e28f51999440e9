// Colors of runs where more than three are shown: those that TensorBoard gives them.
import {known} from '../records.js';
import {colorAt} from '../theme.js';

export const colorOf = (name) => colorAt(Math.max(0, known.value.colored.indexOf(name)));
