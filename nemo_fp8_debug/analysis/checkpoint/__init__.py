"""Measure the errors of a checkpoint's weights in FP8 and BF16, without running the checkpoint's code. Internal."""
