"""What an operand is called, in code and to people."""

from __future__ import annotations

#: operand roles of a GEMM: X of the forward pass, W, and the gradient of the output, dY
ROLES = ("input", "weight", "grad_output")
#: GEMM and role
Key = tuple[str, str]

#: the columns that say what a row is about; metrics follow
KEYS = ("layer", "gemm", "role")
#: operand roles of FP8 attention, in the order of a forward pass and of a backward pass, and how people write them: S is
#: softmax(Q K^T), O is S V, and dP the gradient of what the softmax gets
ATTENTION_FORWARD = {"query": "Q", "key": "K", "value": "V", "probabilities": "S", "context": "O"}
ATTENTION_BACKWARD = {
    "grad_context": "dO",
    "grad_scores": "dP",
    "grad_query": "dQ",
    "grad_key": "dK",
    "grad_value": "dV",
}
#: before the kind of a module that is an attention and no GEMM, where ranks tell each other what they have
ATTENTION = "attention of "
#: tensors of the optimizer's that lie as a weight does, and how people write them
STATES = {
    "weight_gradient": "dW",
    "first_moment": "m",
    "second_moment": "v",
    "master_weight": "master W",
    "update": "step of W",
}
#: what lies between GEMMs, by what is asked for
ACTIVATIONS = {
    "norm": {"norm_input": "input", "norm_output": "output"},
    "router": {"router_logits": "logits"},
    "attention": {"attention_logits": "logits"},
}
_OF_ACTIVATIONS = {role: shown for roles in ACTIVATIONS.values() for role, shown in roles.items()}
#: how people write the operand roles, and those
SHOWN_AS = {
    **{"input": "X", "weight": "W", "grad_output": "dY"},
    **ATTENTION_FORWARD,
    **ATTENTION_BACKWARD,
    **STATES,
    **_OF_ACTIVATIONS,
}
#: how people write what a GEMM returns, by product, and what ranks make of dW
RESULTS = {"fprop": "Y", "dgrad": "dX", "wgrad": "dW", "reduction": "the reduced dW"}
#: roles whose values are multiplied by the effective gradient scale
GRADIENTS = ("grad_output", *ATTENTION_BACKWARD)
#: numbers of every step that a host may report
STEP_SCALARS = ("loss", "grad_norm", "lr", "loss_scale", "skipped", "consumed_samples", "grad_scale")
#: source of the scales of experts that were not all found in the same way
MIXED = "mixed"


def list_roles(kind: str) -> tuple[str, ...]:
    """The operand roles of a module of this kind."""
    return (*ATTENTION_FORWARD, *ATTENTION_BACKWARD) if kind.startswith(ATTENTION) else ROLES
