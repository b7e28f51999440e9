"""Where samples go: the run record, TensorBoard, the terminal. Internal."""
