"""All thresholds of rules and of the decision: value, unit, and the reason for each.

Rules read thresholds as attributes of this module, so that an ablation can change a threshold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class RuleThreshold:
    """A threshold, with its reason in one sentence of at most 15 words: what it decides, or why it has this value."""

    name: str
    value: float
    unit: str
    reason: str


TABLE: list[RuleThreshold] = []


def _threshold(name: str, value: Number, unit: str, reason: str) -> Number:
    TABLE.append(RuleThreshold(name, value, unit, reason))
    return value


# What lasts -----------------------------------------------------------------------------------------------------------
IN_A_ROW = _threshold("IN_A_ROW", 2, "samples", "One sample may be a bad batch.")
#: widths around a step
LASTING = 2 * IN_A_ROW
FEW = _threshold("FEW", 3, "samples", "A median of three survives one outlier.")
STEPS_IN_A_ROW = _threshold("STEPS_IN_A_ROW", 5, "steps", "A dynamic loss scale skips fewer steps in a row.")
LEVEL = _threshold("LEVEL", 10, "steps", "Levels of the gradient norm are medians over this many.")
BEGINNING = _threshold("BEGINNING", 0.25, "of a run", "Without a baseline, this first part shows what is usual.")
EARLY = _threshold("EARLY", 0.1, "of a run", "Gradients fall in this first part, because the model begins to learn.")
# Operands -------------------------------------------------------------------------------------------------------------
SCALE_OFF = _threshold("SCALE_OFF", 1.0, "bits", "A healthy amax moves by one bit between samples.")
SCALE_JUMP = _threshold("SCALE_JUMP", 3.0, "bits", "Healthy values move by less between samples.")
LOST_MORE = _threshold("LOST_MORE", 0.5, "% of values", "An operand leaves its band at twice this underflow.")
STRONG_PART = _threshold(
    "STRONG_PART", 0.2, "of the strongest", "A weaker finding is a consequence: a fault moves its own tensor most."
)
OUTLIER_HIGHER = _threshold("OUTLIER_HIGHER", 2.0, "bits", "Gaussian maxima move by under one bit between samples.")
MOST = _threshold("MOST", 0.75, "of layers", "A cause that acts on all layers shows in this many.")
# Settings and steps ---------------------------------------------------------------------------------------------------
RATE_DIFFERS = _threshold("RATE_DIFFERS", 1.05, "times", "Rounding alone makes learning rates differ by less.")
FACTOR = _threshold("FACTOR", 1.5, "times", "Mistakes multiply gradients by two or more.")
NORM_MOVES = _threshold("NORM_MOVES", 0.85, "bits", "A factor of two is one bit, and noise takes a part of it.")
NORM_SIGMAS = _threshold("NORM_SIGMAS", 6.0, "standard deviations", "Gaussian noise gets this far with a chance below 1e-8.")
NORM_APART = _threshold(
    "NORM_APART", 1.0, "bits", "First gradient norms of clean pairs with other seeds differ by at most 0.46 bits."
)
SIZE_OFF = _threshold("SIZE_OFF", 3.0, "bits", "dY of one kind of GEMM differs by at most 1.44 bits in clean pairs.")
OTHER_BATCHES = _threshold(
    "OTHER_BATCHES", 2.0, "times a limit", "Two of 128 clean pairs with other batches reach 1.6 times."
)
FIRST_STEP = _threshold(
    "FIRST_STEP", 0.03, "bits", "If losses and weights are bit-identical, only the order of sums moves dW."
)
FIRST_STEP_ROUNDED = _threshold(
    "FIRST_STEP_ROUNDED", 0.25, "bits", "If clean pairs round differently, dW moves by at most 0.08 bits."
)
SKIPPED_SHARE = _threshold("SKIPPED_SHARE", 0.05, "of steps", "A dynamic loss scale skips 1 step in 2,000.")
AT_ONCE = _threshold("AT_ONCE", 0.8, "of a move", "A jump shows this much within three steps.")
NEAR = _threshold("NEAR", 0.75, "bits", "dY of a layer follows the norm if it is this close.")
LEAST_SHARE = _threshold(
    "LEAST_SHARE", 2.0**-14, "of the loss scale", "Gradients with a smaller share never had the loss scale."
)
# Weights --------------------------------------------------------------------------------------------------------------
DECAY = _threshold("DECAY", 1.0, "weight decay", "Decays in use are 0.01 to 0.3.")
RANGE_MOVES = _threshold("RANGE_MOVES", 1e-3, "bits", "One step of BF16 moves a weight's range by more.")
STEP_LARGE = _threshold("STEP_LARGE", 0.1, "of the weight", "Adam changes a weight by about a thousandth.")
# Between GEMMs --------------------------------------------------------------------------------------------------------
TIMES_USUAL = _threshold("TIMES_USUAL", 4.0, "times", "Norms of healthy layers move by less than two bits.")
LOGIT = _threshold("LOGIT", 50.0, "", "exp(50) separates one key from all others.")
COLLAPSED = _threshold("COLLAPSED", 0.95, "of the tokens", "A router has collapsed if one expert gets this much.")
UNEVEN = _threshold("UNEVEN", 0.6, "of the tokens", "A router that was always this uneven has not collapsed.")
TOKENS = _threshold("TOKENS", 16.0, "tokens", "An even router sends an expert none with a chance of 1e-7.")
# Loss -----------------------------------------------------------------------------------------------------------------
MAX_GAP = _threshold("MAX_GAP", 2.0, "%", "A larger gap is harm, unless you set another limit.")
DEPARTS_SIGMAS = _threshold(
    "DEPARTS_SIGMAS", 4.0, "standard deviations", "Chance moves a smoothed loss this far in 3 of 100,000 windows."
)
SURE = _threshold("SURE", 0.999, "confidence", "One run in a thousand rises this far by chance.")
NEAR_ZERO = _threshold("NEAR_ZERO", 1e-3, "of the loss", "A loss that falls this far is judged by its range.")
LEVEL_NEAR_ZERO = _threshold(
    "LEVEL_NEAR_ZERO", 0.1, "of the range", "A loss that crosses zero and ends nearer to it is judged by its range."
)
LEVEL_SIGMAS = _threshold(
    "LEVEL_SIGMAS", 3.5, "standard deviations", "Jumps of the loss in 936 clean runs reach at most 2.3."
)
LEVEL_PART = _threshold("LEVEL_PART", 0.05, "of the loss", "Noise that persists makes smaller jumps of the loss.")
ABRUPT_PART = _threshold("ABRUPT_PART", 0.5, "of the rise", "A jump brings this much within five steps.")
STEP_SURE = _threshold("STEP_SURE", 0.995, "confidence", "One in 200 jumps at a given step is by chance.")
OTHER_SEEDS = _threshold("OTHER_SEEDS", 12.0, "%", "Two of 1,032 clean pairs with other seeds lie farther apart.")
OTHER_MODELS = _threshold("OTHER_MODELS", 40.0, "%", "Losses of models of another size differ by up to a third.")
# Confidence -----------------------------------------------------------------------------------------------------------
HIGH = _threshold("HIGH", 0.95, "of verdicts right", "*High confidence* promises this share.")
MEDIUM = _threshold("MEDIUM", 0.8, "of verdicts right", "*Medium confidence* promises this share.")
