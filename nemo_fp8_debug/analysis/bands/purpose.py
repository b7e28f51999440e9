"""What a GEMM is for, whatever its framework calls it."""

from __future__ import annotations

import functools
import re

from ...core.layer_names import aggregate_of, is_aggregate

#: by purpose, names of GEMMs; those that both attention and MLP have are told apart by what they lie in
_NAMES = {
    "attention in": r"(linear_)?(qkv|q|k|v|query|key|value|query_key_value)(_proj)?|c_attn|in_proj|wqkv|w[qkv]",
    "attention out": r"(linear_)?(o|out)_proj|linear_proj|wo",
    "mlp in": r"(linear_)?fc1|(gate|up|gate_up)_proj|w1|w3|c_fc|dense_h_to_4h",
    "mlp out": r"(linear_)?fc2|down_proj|w2|dense_4h_to_h",
    "router": r"gate|router",
    "output": r"lm_head|output_layer|classifier|score|output",
}
_ATTENTION, _MLP = (
    re.compile(r"attn|attention", re.IGNORECASE),
    re.compile(r"mlp|feed_forward|ffn|intermediate", re.IGNORECASE),
)


@functools.lru_cache(maxsize=1 << 16)
def purpose_of(layer: str) -> str | None:
    """What a GEMM is for; None where its name does not tell.

    >>> purpose_of("decoder.layers.3.self_attention.linear_qkv"), purpose_of("model.layers.0.mlp.experts.5.w2")
    ('attention in', 'expert mlp out')
    >>> purpose_of("encoder.layer.0.attention.output.dense"), purpose_of("encoder.layer.0.intermediate.dense")
    ('attention out', 'mlp in')
    >>> purpose_of("adapter.7") is None
    True
    """
    parts = [part for part in layer.split(".") if not part.isdigit() and part != "*"]
    if not parts:
        return None
    last, before = parts[-1].lower(), ".".join(parts[:-1])
    found = next((purpose for purpose, names in _NAMES.items() if re.fullmatch(names, last)), None)
    if last in ("dense", "c_proj", "proj"):
        found = (
            "mlp in" if before.endswith("intermediate") else "mlp out" if not _ATTENTION.search(before) else "attention out"
        )
        found = "attention out" if found == "mlp out" and last == "proj" and not _MLP.search(before) else found
    expert = is_aggregate(layer) or aggregate_of(layer) is not None
    return f"expert {found}" if found and expert else found
