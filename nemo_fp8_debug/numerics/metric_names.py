"""The names of metrics, for those that read them and need no torch."""

#: metrics in the order of the record's columns, and whether more of one is worse (1) or better (-1)
WORSE = {
    "underflow_pct": 1,
    "overflow_pct": 1,
    "mse": 1,
    "relative_error": 1,
    "sqnr_db": -1,
    "cosine": -1,
    "scale_ratio_log2": 1,
    "amax": 1,
    "amin": -1,
    "dynamic_range_log2": 1,
    "outlier_log2": 1,
    "kurtosis": 1,
}
METRICS = tuple(WORSE)
#: what people call each, and its unit
LABELS = {
    "underflow_pct": ("underflow", "%"),
    "overflow_pct": ("overflow", "%"),
    "mse": ("mean squared error", ""),
    "relative_error": ("relative error", ""),
    "sqnr_db": ("signal to quantization noise", "dB"),
    "cosine": ("cosine", ""),
    "scale_ratio_log2": ("scale in use / current scale", "log2"),
    "amax": ("largest magnitude", ""),
    "amin": ("smallest magnitude", ""),
    "dynamic_range_log2": ("largest / smallest magnitude", "log2"),
    "outlier_log2": ("largest / median magnitude", "log2"),
    "kurtosis": ("kurtosis", ""),
    "nonfinite": ("NaN and infinities", ""),
    "channel_ratio": ("largest / median channel", ""),
    "entropy": ("entropy of weights", "nats"),
    "sink_pct": ("weight of the first key", "%"),
    "load_ratio": ("largest / mean load of experts", ""),
    "idle_experts": ("experts without a token", "experts"),
    "dropped_pct": ("dropped tokens", "%"),
    "norm": ("norm", ""),
    "share_pct": ("share of all squared norms", "%"),
    "update_to_weight": ("step of W / W", ""),
    "update_error": ("error of the step of W", ""),
    "error_of_weight_gradient": ("error of the step of W by dW", ""),
    "error_of_first_moment": ("error of the step of W by m", ""),
    "error_of_second_moment": ("error of the step of W by v", ""),
    "error_of_weight": ("error of the step of W by its rounding", ""),
}

#: metrics that grow with the values, and with which power of them
UNITS = {"amax": 1, "amin": 1, "mse": 2}

#: metrics of what GEMMs put out
OUTPUT_METRICS = ("relative_error", "error_of_input", "error_of_weight", "error_of_grad_output")
#: of the scales of an operand's blocks
BLOCK_SCALES = ("blocks", "empty_blocks", "scale_min", "scale_median", "scale_max", "at_smallest_pct", "at_largest_pct")
#: of what optimizers keep beside those of all tensors
STATE_METRICS = ("norm", "share_pct", "update_to_weight")
#: of what a step adds to a weight: its error, and what of it each of these does
UPDATE_METRICS = (
    "update_error",
    "error_of_weight_gradient",
    "error_of_first_moment",
    "error_of_second_moment",
    "error_of_weight",
)
#: of activations beside those of all tensors
ACTIVATION_METRICS = (
    "rows",
    "channel",
    "channel_ratio",
    "entropy",
    "sink_pct",
    "load_ratio",
    "idle_experts",
    "dropped_pct",
)


def label_of(metric: str) -> str:
    """What people call a metric, with its unit.

    Example:
        >>> label_of("underflow_pct"), label_of("mse"), label_of("something_new")
        ('underflow (%)', 'mean squared error', 'something new')
    """
    label, unit = LABELS.get(metric, (metric.replace("_", " "), ""))
    return f"{label} ({unit})" if unit else label
