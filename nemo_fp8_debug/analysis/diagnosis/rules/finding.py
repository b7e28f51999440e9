"""What a rule has found."""

from __future__ import annotations

from dataclasses import dataclass

from ....core.keys import SHOWN_AS

#: what can be the matter, and in a word what it means
CAUSES = {
    "stale_scale": "the scale in use has not followed the values",
    "corrupted_scale": "the scale in use jumped and the values did not",
    "clipping": "the scale in use is too large, and large values are clipped",
    "underflow": "small values become zero",
    "outlier": "few values are far larger than the others, and one scale cannot hold both",
    "dead": "all values are zero",
    "nonfinite": "values are NaN or infinite",
    "multiplier": "gradients are multiplied by something that they should not be",
    "changed_recipe": "the recipe that it is cast under is another one",
    "learning_rate": "the learning rate is the cause",
    "weight_decay": "the weights shrink faster than under any weight decay in use",
    "attention_logits": "logits of attention grow until the weights of a row are those of a few keys",
    "router_collapse": "a router gives nearly all tokens to the same expert",
    "dead_experts": "experts are given no tokens",
    "step_size": "steps of a weight are far too large for it, or nothing",
    "skipped": "the optimizer skips steps",
    "wrong_product": "a GEMM returned what is not the product of its operands; look at kernels, caches and hardware",
    "wrong_reduction": "a gradient is not the sum of what ranks and micro-batches computed; look at communication",
    "replicas": "ranks hold different copies of what ought to be the same; look at communication and hardware",
    "software": "the cause is not how FP8 represents the operands; look at learning rate, data, kernels and communication",
    "none": "nothing is wrong",
    "unknown": "cannot tell",
}
#: causes that are not in how FP8 represents operands: what helps against that does not help against these
NOT_FP8 = (
    *("learning_rate", "weight_decay", "multiplier", "skipped"),
    *("wrong_product", "wrong_reduction", "replicas", "software"),
    *("attention_logits", "router_collapse", "dead_experts", "step_size"),
)
#: causes that are in the values before anything casts them: what computes the tensor is to be looked at, and no recipe
NO_RECIPE = ("dead", "nonfinite")
CONFIDENCE = ("high", "medium", "low")


@dataclass(frozen=True)
class Finding:
    """The answer of a rule, with what it rests on."""

    rule: str
    #: one of CAUSES
    cause: str
    #: one of CONFIDENCE
    confidence: str
    #: metrics, in a sentence
    evidence: str
    #: what to do, in a sentence; empty where there is nothing to
    advice: str = ""
    layer: str | None = None
    role: str | None = None
    #: first step that it holds of
    since: int | None = None
    #: whether a loss that left before can have brought it about, as it changes values but not what scales do with them
    may_follow_the_loss: bool = False
    #: of an operand out of band: how many times the least that counts
    excess: float | None = None
    #: what it did to runs of the benchmark that had it: 2, most were harmed; 1, up to half of them; 0, it may do nothing
    severity: int = 0

    @property
    def operand(self) -> str | None:
        """As people write it; None where it is about the run as a whole."""
        return f"{SHOWN_AS[self.role]} of {self.layer}" if self.layer and self.role else None
