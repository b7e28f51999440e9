"""All thresholds of rules and of the decision: value, unit, and the reason for each.

Rules read them as attributes of this module, so that an ablation can change one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class RuleThreshold:
    """A number that decides, and why it has this value."""

    name: str
    value: float
    unit: str
    reason: str


TABLE: list[RuleThreshold] = []


def _threshold(name: str, value: Number, unit: str, reason: str) -> Number:
    TABLE.append(RuleThreshold(name, value, unit, reason))
    return value


# What lasts -------------------------------------------------------------------------------------------------------------
IN_A_ROW = _threshold("IN_A_ROW", 2, "samples", "One sample may be a bad batch.")
#: what is seen around a step
LASTING = 2 * IN_A_ROW
FEW = _threshold("FEW", 3, "samples", "A median of three survives one outlier.")
STEPS_IN_A_ROW = _threshold("STEPS_IN_A_ROW", 5, "steps", "A dynamic loss scale skips a few steps in a row at most.")
LEVEL = _threshold("LEVEL", 10, "steps", "The median of ten values moves by 0.4 of their standard deviation.")
BEGINNING = _threshold("BEGINNING", 0.25, "of a run", "Without a baseline the first quarter tells what is usual.")
EARLY = _threshold("EARLY", 0.1, "of a run", "In which gradients fall because the model begins to learn.")
# Operands ---------------------------------------------------------------------------------------------------------------
SCALE_OFF = _threshold(
    "SCALE_OFF", 1.0, "bits", "One bit is the step of a power-of-two scale, and what a healthy amax moves by in a sample."
)
SCALE_JUMP = _threshold(
    "SCALE_JUMP", 3.0, "bits", "Values of a healthy run move by less from one sample to the next; a flipped bit moves more."
)
LOST_MORE = _threshold("LOST_MORE", 0.5, "% of values", "Half of the least underflow that counts as out of band.")
STRONG_PART = _threshold(
    "STRONG_PART", 0.2, "of the strongest", "A fault moves its own tensor most; what it drags along moves less."
)
OUTLIER_HIGHER = _threshold(
    "OUTLIER_HIGHER", 2.0, "bits", "The largest of n Gaussian values moves by less than one bit between samples."
)
MOST = _threshold(
    "MOST", 0.75, "of layers", "A decay, a factor or a setting acts on all; three in four leave room for noise."
)
# Settings and steps -----------------------------------------------------------------------------------------------------
RATE_DIFFERS = _threshold("RATE_DIFFERS", 1.05, "times", "Schedules computed in other ways differ by rounding only.")
FACTOR = _threshold(
    "FACTOR", 1.5, "times", "By mistake, gradients are multiplied by 2 or more; learning rates are tuned in factors of 2."
)
NORM_MOVES = _threshold("NORM_MOVES", 0.85, "bits", "A factor of 2 is one bit; this leaves room for noise.")
NORM_SIGMAS = _threshold("NORM_SIGMAS", 6.0, "standard deviations", "Chance of less than 1e-8 a step for Gaussian noise.")
NORM_APART = _threshold(
    "NORM_APART", 1.0, "bits", "First gradient norms of clean pairs of other seeds differ by at most 0.46 bits; twice that."
)
SIZE_OFF = _threshold(
    "SIZE_OFF",
    3.0,
    "bits",
    "dY of a kind of GEMM is at most 1.44 bits off others in 848 clean pairs; twice that.",
)
OTHER_BATCHES = _threshold(
    "OTHER_BATCHES",
    2.0,
    "times a limit",
    "Another seed's values differ: 2 of 128 clean pairs reach up to 1.6 times a limit.",
)
FIRST_STEP = _threshold(
    "FIRST_STEP", 0.03, "bits", "If loss and weights are bit-identical, dW differs by the order of sums: far below 2%."
)
FIRST_STEP_ROUNDED = _threshold(
    "FIRST_STEP_ROUNDED",
    0.25,
    "bits",
    "In 32 clean pairs that round otherwise, dW moves by at most 0.08 bits; 3 times that.",
)
SKIPPED_SHARE = _threshold("SKIPPED_SHARE", 0.05, "of steps", "A dynamic loss scale skips 1 step in 2,000 by design.")
AT_ONCE = _threshold("AT_ONCE", 0.8, "of a move", "That two medians of ten values straddle, and that three show.")
NEAR = _threshold("NEAR", 0.75, "bits", "A layer's dY moves with the norm, within noise, and less than a factor of 2 off.")
LEAST_SHARE = _threshold("LEAST_SHARE", 2.0**-14, "of the loss scale", "More ranks times micro-batches are not in use.")
# Weights ----------------------------------------------------------------------------------------------------------------
DECAY = _threshold("DECAY", 1.0, "weight decay", "Decays in use lie between 0.01 and 0.3.")
RANGE_MOVES = _threshold("RANGE_MOVES", 1e-3, "bits", "A step of BF16 is 2^-8; decay moves the range by less.")
STEP_LARGE = _threshold("STEP_LARGE", 0.1, "of the weight", "Adam changes a weight by about a thousandth of its size.")
# Between GEMMs ----------------------------------------------------------------------------------------------------------
TIMES_USUAL = _threshold("TIMES_USUAL", 4.0, "times", "Norms of healthy layers move by less than two bits.")
LOGIT = _threshold("LOGIT", 50.0, "", "exp(50) tells one key from all others.")
COLLAPSED = _threshold("COLLAPSED", 0.95, "of the tokens", "One expert gets nearly all; an even router gives 1/experts.")
UNEVEN = _threshold("UNEVEN", 0.6, "of the tokens", "A router that was so uneven all along has not collapsed.")
TOKENS = _threshold("TOKENS", 16.0, "tokens", "Expected by chance: an even router gives none with a chance of 1e-7.")
# Loss -------------------------------------------------------------------------------------------------------------------
MAX_GAP = _threshold("MAX_GAP", 2.0, "%", "What counts as harm, unless you say otherwise: evaluations differ by less.")
DEPARTS_SIGMAS = _threshold(
    "DEPARTS_SIGMAS", 4.0, "standard deviations", "Of a smoothed loss: chance of 3e-5, in some thirty independent windows."
)
SURE = _threshold("SURE", 0.999, "confidence", "One false rise of the loss in a thousand runs.")
NEAR_ZERO = _threshold("NEAR_ZERO", 1e-3, "of the loss", "Of a loss that fell to a thousandth, nothing is left to lose.")
LEVEL_NEAR_ZERO = _threshold(
    "LEVEL_NEAR_ZERO", 0.1, "of the range", "Nearer to zero, the level of a loss that crosses zero is an accident."
)
LEVEL_SIGMAS = _threshold(
    "LEVEL_SIGMAS", 3.5, "standard deviations", "The farthest of 936 clean runs of the benchmark has 2.3."
)
LEVEL_PART = _threshold("LEVEL_PART", 0.05, "of the loss", "A step that noise which persists does not make.")
ABRUPT_PART = _threshold(
    "ABRUPT_PART", 0.5, "of the rise", "Of a rise that takes 20 steps, 5 in a row bring a quarter; of a jump they bring all."
)
STEP_SURE = _threshold("STEP_SURE", 0.995, "confidence", "At a step that something else names: one in 200.")
OTHER_SEEDS = _threshold(
    "OTHER_SEEDS", 12.0, "%", "Of 1,032 clean pairs of another seed in the benchmark, two lie farther apart."
)
OTHER_MODELS = _threshold("OTHER_MODELS", 40.0, "%", "Losses of models of another depth or width differ by up to a third.")
# Confidence -------------------------------------------------------------------------------------------------------------
HIGH = _threshold("HIGH", 0.95, "of verdicts right", "What *high confidence* promises.")
MEDIUM = _threshold("MEDIUM", 0.8, "of verdicts right", "What *medium confidence* promises.")
