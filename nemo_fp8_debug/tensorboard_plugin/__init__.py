"""The FP8 tab of TensorBoard, which shows the run records below the logdir, also while they grow. Internal."""

from .plugin import FP8Plugin

__all__ = ["FP8Plugin"]
