"""The FP8 tab of TensorBoard: reads run records below the logdir and shows them, while they grow. Internal."""

from .plugin import FP8Plugin

__all__ = ["FP8Plugin"]
