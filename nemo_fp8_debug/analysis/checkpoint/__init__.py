"""What FP8 and BF16 make of a checkpoint's weights; builds no model and runs nothing in the checkpoint. Internal."""
