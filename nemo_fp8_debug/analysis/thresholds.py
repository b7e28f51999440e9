"""Thresholds of the rules and of the decision, each with its value, unit and reason.

Rules read thresholds as attributes of this module, so that an ablation can change a threshold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class RuleThreshold:
    """A threshold and its reason, which says in at most 15 words what the threshold decides or why it has this value."""

    name: str
    value: float
    unit: str
    reason: str


TABLE: list[RuleThreshold] = []


def _threshold(name: str, value: Number, unit: str, reason: str) -> Number:
    TABLE.append(RuleThreshold(name, value, unit, reason))
    return value


# Duration -------------------------------------------------------------------------------------------------------------
IN_A_ROW = _threshold("IN_A_ROW", 2, "samples", "A single sample may only show a bad batch.")
#: number of samples on each side of a step that rules check
LASTING = 2 * IN_A_ROW
FEW = _threshold("FEW", 3, "samples", "A median of three survives one outlier.")
STEPS_IN_A_ROW = _threshold("STEPS_IN_A_ROW", 5, "steps", "A dynamic loss scale skips fewer steps in a row.")
LEVEL = _threshold("LEVEL", 10, "steps", "A level of the gradient norm is the median over this many steps.")
BEGINNING = _threshold("BEGINNING", 0.25, "of a run", "Without a baseline, this first part of the run shows usual values.")
EARLY = _threshold("EARLY", 0.1, "of a run", "Gradients fall in this first part, because the model begins to learn.")
# Operands -------------------------------------------------------------------------------------------------------------
SCALE_OFF = _threshold("SCALE_OFF", 1.0, "bits", "A healthy amax changes by up to one bit between samples.")
SCALE_JUMP = _threshold("SCALE_JUMP", 3.0, "bits", "Healthy values change by less between samples.")
LOST_MORE = _threshold("LOST_MORE", 0.5, "% of values", "An operand leaves its band if its underflow rises by twice this.")
STRONG_PART = _threshold(
    "STRONG_PART", 0.2, "of the strongest", "A weaker finding is a consequence, because a fault affects its own tensor most."
)
OUTLIER_HIGHER = _threshold("OUTLIER_HIGHER", 2.0, "bits", "Gaussian maxima change by under one bit between samples.")
MOST = _threshold("MOST", 0.75, "of layers", "A cause that acts on all layers is visible in this fraction.")
VALUES_JUMP = _threshold("VALUES_JUMP", 8.0, "bits", "In 504 clean runs, no lasting jump exceeds 3.1 bits.")
NEAR_ZERO_VALUES = _threshold(
    "NEAR_ZERO_VALUES", -10.0, "bits", "The medians of X and W are larger in all of 192 clean runs."
)
# Settings and steps ---------------------------------------------------------------------------------------------------
RATE_DIFFERS = _threshold("RATE_DIFFERS", 1.05, "times", "Rounding alone changes a learning rate by a smaller factor.")
FACTOR = _threshold("FACTOR", 1.5, "times", "Mistakes multiply gradients by two or more.")
NORM_MOVES = _threshold("NORM_MOVES", 0.85, "bits", "A factor of two is one bit, but noise can hide part of it.")
NORM_SIGMAS = _threshold("NORM_SIGMAS", 6.0, "standard deviations", "The probability of such Gaussian noise is below 1e-8.")
NORM_APART = _threshold(
    "NORM_APART", 1.0, "bits", "First gradient norms of clean runs with different seeds differ by at most 0.46 bits."
)
SIZE_OFF = _threshold("SIZE_OFF", 3.0, "bits", "Between clean runs, dY of one kind of GEMM differs by at most 1.44 bits.")
OTHER_BATCHES = _threshold(
    "OTHER_BATCHES", 2.0, "times a limit", "Of 128 clean pairs with different batches, two reach 1.6 times the limit."
)
FIRST_STEP = _threshold(
    "FIRST_STEP", 0.03, "bits", "If losses and weights are bit-identical, only the summation order changes dW."
)
FIRST_STEP_ROUNDED = _threshold(
    "FIRST_STEP_ROUNDED", 0.25, "bits", "If two clean runs round differently, dW changes by at most 0.08 bits."
)
SKIPPED_SHARE = _threshold("SKIPPED_SHARE", 0.05, "of steps", "A dynamic loss scale skips 1 step in 2,000.")
AT_ONCE = _threshold("AT_ONCE", 0.8, "of a move", "A jump reaches this fraction of its height within three steps.")
NEAR = _threshold("NEAR", 0.75, "bits", "A layer's dY follows the norm if their changes differ by less.")
LEAST_SHARE = _threshold(
    "LEAST_SHARE", 2.0**-14, "of the loss scale", "Gradients with a smaller share were never multiplied by the loss scale."
)
# Weights --------------------------------------------------------------------------------------------------------------
DECAY = _threshold("DECAY", 1.0, "weight decay", "Usual weight decays are 0.01 to 0.3.")
RANGE_MOVES = _threshold("RANGE_MOVES", 1e-3, "bits", "One unit in the last place of BF16 changes a weight's range by more.")
STEP_LARGE = _threshold("STEP_LARGE", 0.1, "of the weight", "Adam changes a weight by about a thousandth per step.")
# Between GEMMs --------------------------------------------------------------------------------------------------------
TIMES_USUAL = _threshold("TIMES_USUAL", 4.0, "times", "Norms of healthy layers change by less than two bits.")
LOGIT = _threshold("LOGIT", 50.0, "", "exp(50) separates one key from all others.")
COLLAPSED = _threshold("COLLAPSED", 0.95, "of the tokens", "A router has collapsed if one expert gets this share.")
UNEVEN = _threshold("UNEVEN", 0.6, "of the tokens", "A router that was always this uneven has not collapsed.")
TOKENS = _threshold("TOKENS", 16.0, "tokens", "An even router sends an expert no tokens with probability 1e-7.")
# Loss -----------------------------------------------------------------------------------------------------------------
MAX_GAP = _threshold("MAX_GAP", 2.0, "%", "A larger gap is harm, unless you set another limit.")
DEPARTS_SIGMAS = _threshold(
    "DEPARTS_SIGMAS", 4.0, "standard deviations", "Noise shifts a smoothed loss this far in 3 of 100,000 windows."
)
SURE = _threshold("SURE", 0.999, "confidence", "One run in a thousand rises this far by chance.")
NEAR_ZERO = _threshold("NEAR_ZERO", 1e-3, "of the loss", "If a loss falls this far, its range counts as 100%.")
LEVEL_NEAR_ZERO = _threshold(
    "LEVEL_NEAR_ZERO", 0.1, "of the range", "If a loss crosses zero and ends closer to zero, its range counts as 100%."
)
LEVEL_SIGMAS = _threshold(
    "LEVEL_SIGMAS", 3.5, "standard deviations", "Jumps of the loss in 936 clean runs reach at most 2.3."
)
LEVEL_PART = _threshold("LEVEL_PART", 0.05, "of the loss", "Persistent noise causes only smaller jumps of the loss.")
ABRUPT_PART = _threshold("ABRUPT_PART", 0.5, "of the rise", "A jump reaches this fraction of the rise within five steps.")
STEP_SURE = _threshold("STEP_SURE", 0.995, "confidence", "Noise causes such a jump at a given step with probability 1/200.")
OTHER_SEEDS = _threshold("OTHER_SEEDS", 12.0, "%", "Of 1,032 clean pairs with different seeds, two differ by more.")
OTHER_MODELS = _threshold("OTHER_MODELS", 40.0, "%", "Losses of models of different sizes differ by up to a third.")
# Confidence -----------------------------------------------------------------------------------------------------------
HIGH = _threshold("HIGH", 0.95, "of verdicts right", "At *high confidence*, at least this share is right.")
MEDIUM = _threshold("MEDIUM", 0.8, "of verdicts right", "At *medium confidence*, at least this share is right.")
