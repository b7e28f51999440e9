"""The coverage ledger of Transformer Engine's own modules."""

from __future__ import annotations

from emulated_te import te
from torch import nn

from nemo_fp8_debug.coverage.scan import ledger_of


def test_linear_layers_and_attention() -> None:
    layers = {
        "linear": te.Linear(32, 64),
        "mlp": te.LayerNormMLP(32, 128),
        "fused": te.LayerNormLinear(32, 96),
        "core": te.DotProductAttention(4, 8),
    }
    ledger = ledger_of([nn.ModuleDict(layers)])
    sizes = {e.name: (e.status, e.multiply_adds) for e in ledger.entries}
    assert sizes == {
        "linear": ("observed", 32 * 64),
        "mlp.fc1": ("observed", 32 * 128),
        "mlp.fc2": ("observed", 128 * 32),
        "fused": ("observed", 32 * 96),
        "core (scores)": ("unknown", None),
        "*": ("unknown", None),
    }
    assert set(ledger.summarize_coverage()["partly_observed"]) == {
        "operands not observed: grad_output",
        "operands not observed: input",
    }


def test_experts_of_a_grouped_linear_without_a_router() -> None:
    """Nothing tells how many of them a token meets."""
    (entry, _) = ledger_of([nn.ModuleDict({"experts": te.GroupedLinear(4, 32, 64)})]).entries
    assert (entry.kind, entry.count, entry.shape, entry.multiply_adds) == ("experts", 4, (64, 32), None)
