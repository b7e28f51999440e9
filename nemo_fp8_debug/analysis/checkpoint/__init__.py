"""Errors of a checkpoint's weights in FP8 and BF16, without a model and without code from the checkpoint. Internal."""
