"""Findings of rules, the causes that they name, the advice for each cause, and the table of causes that explain other
causes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.keys import SHOWN_AS

_OF_OPTIMIZER = "the optimizer, or the gradient of that weight"
_BY_ROLE = {
    "input": "what runs before that GEMM in the forward pass, such as a norm, an activation, attention or a mask",
    "weight": "the optimizer, the gradient of that weight, or the checkpoint that it was loaded from",
    "grad_output": "the backward pass of what follows that GEMM, up to the loss function",
    "weight_gradient": "the backward pass of that GEMM, or the reduction over ranks",
    **dict.fromkeys(("first_moment", "second_moment", "master_weight", "update"), _OF_OPTIMIZER),
}


def advise_on_producer(layer: str, role: str) -> str:
    """Return a sentence that names the code that produces a tensor.

    Example:
        >>> advise_on_producer("layers.0.fc1", "grad_output")
        'Look at what computes dY of layers.0.fc1: the backward pass of what follows that GEMM, up to the loss function.'
    """
    producer = _BY_ROLE.get(role)
    return f"Look at what computes {SHOWN_AS[role]} of {layer}{f': {producer}' if producer else ''}."


def advise_on_nonfinite(layer: str | None, role: str | None, what: str = "", is_sampled: bool = True) -> str:
    """Return sentences that say where to look for the source of NaN or infinity, and how to sample the next such step.

    Args:
        what: description of the first value with NaN or infinity, if the value is not a tensor of a layer.
        is_sampled: whether operands were sampled at that step.
    """
    look = advise_on_producer(layer, role) if layer and role else f"Look at what computes {what}."
    if not layer and not is_sampled:
        unseen = f"No operand was sampled at that step, so the source may be any layer or what computes {what}."
        return f"Resume from a checkpoint before that step with `interval=1`. {unseen} No recipe fixes NaN."
    return f"{look} No recipe fixes NaN. `triggers=['nonfinite']` samples the step after a loss or gradient norm of NaN."


#: strengths of a finding. A `proof` needs no comparison. A `hint` also occurs in healthy runs
STRENGTHS = ("hint", "clear", "proof")


@dataclass(frozen=True)
class Cause:
    """A cause that a verdict can name."""

    #: kind of the cause, a key of `EXPLAINS`
    kind: str
    #: short clause that names the fault; if a tensor is at fault, the clause is about its scale or its values
    means: str
    #: sentences that say where to look, or what to do if no other cast helps
    advice: str = ""


NOT_FP8_ADVICE = "Look at learning rate, data, kernels and communication."
#: causes by name. The kind of a cause decides which other causes it explains, see `EXPLAINS`
CAUSES: Mapping[str, Cause] = {
    "wrong_product": Cause(
        "proof",
        "a GEMM returned something other than the product of its operands",
        "Look at kernels, caches and hardware. If one rank alone shows it, suspect that rank's hardware. Sample it again "
        "with `triggers=['wrong_product']` and dump its operands.",
    ),
    "wrong_reduction": Cause(
        "proof",
        "a gradient is not the sum of what ranks and micro-batches computed",
        "Look at the collective, at what it averages by, at buckets, and at what adds up micro-batches. `replicas=True` "
        "tells whether all ranks got the same.",
    ),
    "replicas": Cause(
        "proof",
        "ranks hold different copies of a tensor that must be the same",
        "Look at the collective that makes copies equal (all-gather of weights, all-reduce of gradients, broadcast at the "
        "start), and at the hardware of the rank that differs.",
    ),
    "changed_recipe": Cause(
        "recipe",
        "the recipe of {tensor} changed",
        "Find out who set the recipe of these operands.",
    ),
    "resumed_without_scales": Cause(
        "recipe",
        "the resume lost the scale of {tensor}",
        "Check that the checkpoint has scales and amax histories, and that the resume loads them.",
    ),
    "learning_rate": Cause(
        "rate", "the learning rate is wrong", "Check the learning-rate schedule and what the run was resumed from."
    ),
    "multiplier": Cause(
        "multiplier",
        "gradients are multiplied by a wrong factor",
        "Look at what multiplies the loss or divides gradients: loss scale, accumulation, averaging over ranks.",
    ),
    "stale_scale": Cause(
        "scale",
        "its scale stands still while its values move",
        "Check that its amax history is updated.",
    ),
    "corrupted_scale": Cause(
        "scale",
        "its scale moved, its values hardly did",
        "Look at what writes the scale: a bad batch in the amax history, a resume, a reduction over ranks.",
    ),
    "clipping": Cause(
        "scale",
        "its scale is too large and clips values",
        "Look at the margin and the amax history of its scale.",
    ),
    "underflow": Cause(
        "scale",
        "its small values become zero",
        "Look at what makes a few of its values so much larger than the others.",
    ),
    "outlier": Cause(
        "values",
        "a few values are far larger than all others",
        "Look at what makes these values so large.",
    ),
    "value_jump": Cause("jump", "its values jumped to another size"),
    "nonfinite": Cause("nonfinite", "its values are NaN or infinite"),
    "dead": Cause("dead", "all its values are zero"),
    "weight_decay": Cause(
        "weights",
        "weights shrink faster than under any weight decay in use",
        "Look at the weight decay, its parameter groups, and what else writes the weights.",
    ),
    "shrinking_weight": Cause(
        "weights",
        "its values shrink faster than under any weight decay in use",
        "Look at the weight decay of this weight's parameter group, and at what else writes the weight.",
    ),
    "frozen_weights": Cause(
        "weights",
        "weights do not move",
        "Check that their gradients arrive (reduction, `requires_grad`), the learning rate of their parameter group, and "
        "that the optimizer writes back to the model.",
    ),
    "step_size": Cause(
        "weights",
        "steps of a weight are far too large for it",
        "Look at the learning rate of this weight's parameter group, and at its gradient.",
    ),
    "skipped": Cause(
        "skips",
        "the optimizer skips steps",
        "Look at what is not finite (`triggers=['nonfinite']`), and at the loss scale.",
    ),
    "attention_logits": Cause(
        "between",
        "attention logits grow until a row attends to a few keys only",
        "Look at the queries and keys of this layer: normalize them (QK-norm), cap the logits, or lower the learning rate.",
    ),
    "router_collapse": Cause(
        "between",
        "a router sends nearly all tokens to one expert",
        "Look at the router's bias, its load-balancing loss and z-loss, and the precision it computes in.",
    ),
    "dead_experts": Cause(
        "between",
        "experts get no tokens",
        "Look at the router's bias, its load-balancing loss and z-loss, and the precision it computes in.",
    ),
    "software": Cause("software", "something other than how FP8 represents the operands", NOT_FP8_ADVICE),
    "none": Cause("nothing", "nothing"),
    "unknown": Cause("nothing", "nobody knows why"),
}
#: kinds of findings that any fault may cause
_CONSEQUENCES = frozenset(
    {"values", "jump", "gradients", "nonfinite", "weights", "skips", "between", "multiplier", "software"}
)
#: kinds of causes in order of precedence, with the kinds that each kind explains if its finding is earlier than theirs
EXPLAINS: Mapping[str, frozenset[str]] = {
    "proof": _CONSEQUENCES | {"scale", "dead", "size"},
    "recipe": _CONSEQUENCES | {"scale", "dead", "size"},
    "rate": _CONSEQUENCES | {"scale", "size"},
    "nonfinite": _CONSEQUENCES - {"nonfinite"} | {"scale", "dead"},
    "scale": _CONSEQUENCES | {"dead"},
    "values": _CONSEQUENCES - {"values"} | {"dead"},
    "jump": frozenset({"scale", "values", "gradients", "between", "skips", "software"}),
    "dead": frozenset({"scale", "values", "gradients", "weights", "software", "multiplier"}),
    "multiplier": frozenset({"gradients", "skips", "software", "weights"}),
    "size": frozenset({"values", "gradients", "scale", "software"}),
    "weights": frozenset({"values", "jump", "gradients", "between", "skips", "software"}),
    "between": frozenset({"gradients", "skips", "software"}),
    "software": frozenset({"gradients", "values", "skips"}),
    "gradients": frozenset({"skips"}),
    "skips": frozenset(),
    "nothing": frozenset(),
}
#: kinds of faults in FP8's representation of operands, which a reference run in BF16 cannot have
OF_FP8 = ("recipe", "scale", "values")
#: causes that change values before any cast, so that no recipe helps
NO_RECIPE = ("dead", "nonfinite")
NOT_FP8 = tuple(name for name, cause in CAUSES.items() if cause.kind not in (*OF_FP8, "nonfinite", "dead", "nothing"))


@dataclass(frozen=True)
class Finding:
    """The finding of a rule: a cause, its evidence and its onset."""

    #: name of the rule
    rule: str
    #: one of CAUSES
    cause: str
    #: one of STRENGTHS
    strength: str
    #: the numbers that support the finding, as a sentence without its period
    evidence: str
    layer: str | None = None
    role: str | None = None
    #: first step that shows the fault; None if unknown
    since: int | None = None
    #: advice that replaces the cause's advice
    advice: str = ""
    #: whether an earlier divergence of the loss explains the finding; a divergence explains changed values, but not a wrong
    #: scale
    may_follow_the_loss: bool = False
    #: multiple of the threshold, for a tensor out of band
    excess: float | None = None
    #: kind of the finding if it differs from the cause's kind: `gradients` for changed values of gradients, which many
    #: faults cause, or `size` for values of a wrong size
    of_kind: str = ""
    #: whether the fault began exactly at `since`, and not between the previous sample and `since`
    is_exact: bool = False
    #: the fault may have begun up to this number of steps after `since`
    slack: int = 0
    #: whether the fault may have begun long before `since`
    or_earlier: bool = False
    #: whether the fault ended after one or two samples
    is_transient: bool = False
    #: usual names of other operands with the same fault, which one change caused
    others: Sequence[str] = ()

    @property
    def tensor_name(self) -> str | None:
        """Return the usual name of the tensor, or None if the finding is about the run as a whole."""
        return f"{SHOWN_AS[self.role]} of {self.layer}" if self.layer and self.role else None

    @property
    def tensor_names(self) -> str | None:
        """Return the usual name of the tensor, and the name or number of others with the same fault."""
        named = self.others[0] if len(self.others) == 1 else f"{len(self.others)} other operands"
        more = f" and {named}" if self.others else ""
        return f"{self.tensor_name}{more}" if self.tensor_name else None

    @property
    def is_out_of_band(self) -> bool:
        """Return True if the finding is about a tensor that left its band."""
        return self.excess is not None

    @property
    def kind(self) -> str:
        """Return the kind of the finding, a key of `EXPLAINS`."""
        return self.of_kind or CAUSES[self.cause].kind

    @property
    def strength_rank(self) -> int:
        """Return the rank of the finding's strength, larger for stronger findings."""
        return STRENGTHS.index(self.strength)

    def advise(self) -> str:
        """Return the advice."""
        return self.advice or CAUSES[self.cause].advice
