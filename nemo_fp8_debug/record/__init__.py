"""Write samples to the run record, TensorBoard and the terminal, and read them. Internal."""
