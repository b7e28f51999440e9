"""Names of operands, in code and for people."""

from __future__ import annotations

#: operand roles of a GEMM: its input X, its weight W, and the gradient of its output, dY
ROLES = ("input", "weight", "grad_output")
#: name of a GEMM, and role of the operand
Key = tuple[str, str]

#: the columns that identify a row; columns of metrics come after them
KEYS = ("layer", "gemm", "role")
#: operand roles of FP8 attention and their symbols, in the order of a forward pass and of a backward pass. S is
#: softmax(Q K^T), O is S V, and dP is the gradient of the softmax's input
ATTENTION_FORWARD = {"query": "Q", "key": "K", "value": "V", "probabilities": "S", "context": "O"}
ATTENTION_BACKWARD = {
    "grad_context": "dO",
    "grad_scores": "dP",
    "grad_query": "dQ",
    "grad_key": "dK",
    "grad_value": "dV",
}
#: prefix of a module's kind in messages between ranks, if the module is an attention instead of a GEMM
ATTENTION = "attention of "
#: tensors of the optimizer that are laid out like a weight, and their symbols
STATES = {
    "weight_gradient": "dW",
    "first_moment": "m",
    "second_moment": "v",
    "master_weight": "master W",
    "update": "step of W",
}
#: tensors between GEMMs and their symbols, by the option that records them
ACTIVATIONS = {
    "norm": {"norm_input": "input", "norm_output": "output"},
    "router": {"router_logits": "logits"},
    "attention": {"attention_logits": "logits"},
}
_OF_ACTIVATIONS = {role: shown for roles in ACTIVATIONS.values() for role, shown in roles.items()}
#: symbols of all roles
SHOWN_AS = {
    **{"input": "X", "weight": "W", "grad_output": "dY"},
    **ATTENTION_FORWARD,
    **ATTENTION_BACKWARD,
    **STATES,
    **_OF_ACTIVATIONS,
}
#: symbols of the results of a GEMM's products, and of dW after its reduction over ranks
RESULTS = {"fprop": "Y", "dgrad": "dX", "wgrad": "dW", "reduction": "the reduced dW"}
#: roles whose values are multiplied by the effective gradient scale
GRADIENTS = ("grad_output", *ATTENTION_BACKWARD)
#: scalars of a step that a framework may report
STEP_SCALARS = ("loss", "grad_norm", "lr", "loss_scale", "skipped", "consumed_samples", "grad_scale")
#: recorded source of an aggregate's scales if its experts have different sources
MIXED = "mixed"


def list_roles(kind: str) -> tuple[str, ...]:
    """Return the operand roles of a module of this kind."""
    return (*ATTENTION_FORWARD, *ATTENTION_BACKWARD) if kind.startswith(ATTENTION) else ROLES
