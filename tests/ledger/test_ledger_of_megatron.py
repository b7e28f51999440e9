"""The ledger of megatron-core models against closed formulas, and against what torch counts in a step."""

from __future__ import annotations

import pytest
from ledger_models import close, count_step, of_kind
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
        ledger = ledger_of([model])
        rows = 2 * SEQUENCE
        assert ledger.forward() == close(2 * self.LAYER + self.H * VOCABULARY)
        assert ledger.share_not_observed() == 0
        multiplied = rows * (ledger.forward() + ledger.backward()) + 3 * self.SCORES
        assert count_step(model, lambda m: loss_of(m, 0)) == close(multiplied)

    def test_mixture_of_experts(self) -> None:
        model = gpt(experts=4)
        ledger = ledger_of([model])
        experts, routers, rows = 2 * 2 * 2 * self.H * self.F, 2 * self.H * 4, 2 * SEQUENCE
        assert sum(e.forward or 0 for e in of_kind(ledger, "experts")) == close(experts)
        assert ledger.forward() == close(2 * 4 * self.H**2 + experts + routers + self.H * VOCABULARY)
        assert ledger.share_not_observed() == close(routers / ledger.forward())
        multiplied = rows * (ledger.forward() + ledger.backward()) + 3 * self.SCORES
        assert count_step(model, lambda m: loss_of(m, 0)) == close(multiplied)

    def test_capacity_leaves_the_size_of_experts_unknown(self) -> None:
        model = gpt(experts=4, moe_expert_capacity_factor=1.0, moe_router_load_balancing_type="none")
        assert {e.multiply_adds for e in of_kind(ledger_of([model]), "experts")} == {None}
