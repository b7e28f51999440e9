"""The ledger of megatron-core models against closed formulas, and against what a step was seen to multiply."""

from __future__ import annotations

import pytest
from ledger_models import close, counted_step, of_kind
from small_models.megatron import SEQUENCE, VOCABULARY, gpt, loss_of

from nemo_fp8_debug.coverage.scan import ledger_of


@pytest.mark.usefixtures("megatron")
class TestMegatron:
    H, F, HEADS = 32, 64, 2
    LAYER = 4 * H * H + 2 * H * F
    #: Q K^T and scores times V
    SCORES = 2 * 2 * HEADS * SEQUENCE * SEQUENCE * 2 * (H // HEADS)

    @pytest.mark.parametrize("tied", [False, True])
    def test_gpt(self, tied: bool) -> None:
        model = gpt(tied=tied)
        ledger, counted = ledger_of([model]), counted_step(model, lambda m: loss_of(m, 0))
        rows = 2 * SEQUENCE
        assert ledger.forward() == close(2 * self.LAYER + self.H * VOCABULARY)
        assert ledger.share_not_observed() == 0
        assert counted.total("forward") == close(rows * ledger.forward() + self.SCORES)
        assert counted.total("backward") == close(rows * ledger.backward() + 2 * self.SCORES)
        assert counted.total("backward", "output_layer") == close(2 * rows * self.H * VOCABULARY)
        assert counted.total("forward", "core_attention") == self.SCORES

    def test_mixture_of_experts(self) -> None:
        model = gpt(experts=4)
        ledger, counted = ledger_of([model]), counted_step(model, lambda m: loss_of(m, 0))
        experts, routers, rows = 2 * 2 * 2 * self.H * self.F, 2 * self.H * 4, 2 * SEQUENCE
        assert sum(e.forward or 0 for e in of_kind(ledger, "experts")) == close(experts)
        assert ledger.forward() == close(2 * 4 * self.H**2 + experts + routers + self.H * VOCABULARY)
        assert ledger.share_not_observed() == close(routers / ledger.forward())
        assert counted.total("forward") == close(rows * ledger.forward() + self.SCORES)
        assert counted.total("backward") == close(rows * ledger.backward() + 2 * self.SCORES)
        assert counted.total("forward", r"experts.*linear_fc1$") == close(rows * experts / 2)

    def test_recompute(self) -> None:
        options = {"recompute_method": "uniform", "recompute_granularity": "full", "recompute_num_layers": 1}
        counted = counted_step(gpt(**options), lambda m: loss_of(m, 0))
        assert counted.total("recompute") == close(2 * SEQUENCE * 2 * self.LAYER + self.SCORES)
        assert counted.total("backward") == counted_step(gpt(), lambda m: loss_of(m, 0)).total("backward")

    def test_capacity_leaves_the_size_of_experts_unknown(self) -> None:
        model = gpt(experts=4, moe_expert_capacity_factor=1.0, moe_router_load_balancing_type="none")
        assert {e.multiply_adds for e in of_kind(ledger_of([model]), "experts")} == {None}
