"""What FP8 and BF16 make of a checkpoint's weights, read without building the model and without running anything in it."""
