// Marks of events, told apart by shape and color.

/** By kind: what it is called, its shape, and whether it is filled. */
export const KINDS = {
  lr: {label: 'learning rate', shape: 'square', filled: true},
  grad_norm: {label: 'gradient norm', shape: 'up', filled: true},
  multiplier: {label: 'gradients multiplied', shape: 'up', filled: false},
  loss: {label: 'loss diverges', shape: 'down', filled: true},
  reference: {label: "reference run's loss diverges", shape: 'down', filled: true},
  scale: {label: 'scale goes wrong', shape: 'diamond', filled: true},
  values: {label: 'values out of band', shape: 'circle', filled: true},
  nonfinite: {label: 'NaN or infinity', shape: 'cross', filled: true},
  warning: {label: 'early warning', shape: 'circle', filled: false},
  recipe: {label: 'other recipe', shape: 'diamond', filled: false},
  weights: {label: 'weights shrink', shape: 'square', filled: false},
  product: {label: 'wrong product', shape: 'plus', filled: true},
  replica: {label: 'copies differ', shape: 'bar', filled: true},
  optimizer: {label: 'steps skipped', shape: 'bar', filled: false},
};

const PATHS = {
  square: 'M-5-5H5V5H-5Z',
  up: 'M0-6 6 5H-6Z',
  down: 'M0 6 6-5H-6Z',
  diamond: 'M0-7 6 0 0 7-6 0Z',
  circle: 'M-5.5 0a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0-11 0Z',
  cross: 'M-6-4-4-6 0-2 4-6 6-4 2 0 6 4 4 6 0 2-4 6-6 4-2 0Z',
  plus: 'M-2-6H2V-2H6V2H2V6H-2V2H-6V-2H-2Z',
  bar: 'M-3-6H3V6H-3Z',
};

export const Shape = ({kind}) => <path d={PATHS[KINDS[kind].shape]} class={`event ${kind} ${KINDS[kind].filled ? 'filled' : 'hollow'}`} />;
