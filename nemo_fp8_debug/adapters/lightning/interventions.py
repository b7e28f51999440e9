"""Turn Lightning events into calls of interventions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import nn

from ...capture.gemms import drop_end_layers, find_gemms, require_matching_gemms
from ...core.arguments import check_number, check_strings, reject_unknown_arguments
from ...core.layer_names import compile_layer_patterns
from ...interventions.apply import apply_plan
from ...interventions.emulate import Emulation, check_changes_name_gemms
from ...interventions.transformer_engine import EngineChanges
from ...numerics.recipe import parse_recipe
from ...plan.plan import NO_CHANGES, AnyPlan, read_plan, read_plan_in_force


def find_root_modules(trainer: pl.Trainer, pl_module: pl.LightningModule) -> list[nn.Module]:
    """Return the model. Under NeMo's MegatronStrategy, return the pipeline's chunks of the model."""
    chunks = getattr(trainer.strategy, "megatron_parallel", None)
    return list(chunks) if chunks is not None else [pl_module]


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Return True if the next batch adds its gradients to the gradients of this batch. Under manual optimization, always
    return False.
    """
    result: bool = trainer.fit_loop._should_accumulate()
    return result


class _Intervention(pl.Callback):
    """An intervention that is attached during a fit. Checkpoints save its scales, and a second fit continues with these
    scales.

    Raises:
        ConfigError: on construction or before the first step.
    """

    def __init__(self) -> None:
        self._acting: Emulation | EngineChanges | None = None
        self._resumed: dict[str, Any] | None = None

    def _attached(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Emulation | EngineChanges | None:
        raise NotImplementedError

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach to the model."""
        if self._acting:
            self._resumed = self._acting.state_dict()
            self._acting.detach()
        self._acting = self._attached(trainer, pl_module)
        if self._acting and self._resumed:
            self._acting.load_state_dict(self._resumed)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update delayed scales once per step."""
        if self._acting and not is_accumulating(trainer):
            self._acting.end_step()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Detach from the model."""
        if self._acting:
            self._acting.detach()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore the model, because the run failed."""
        if self._acting:
            self._acting.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return scales and amax histories."""
        return self._acting.state_dict() if self._acting else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scales of a checkpoint."""
        self._resumed = state_dict
        if self._acting and state_dict:
            self._acting.load_state_dict(state_dict)


@reject_unknown_arguments()
class FP8EmulationCallback(_Intervention):
    """A Lightning callback to train with FP8-quantized operands in high-precision GEMMs, without changing the model's code.

    Example:
        >>> from nemo_fp8_debug import FP8EmulationCallback
        >>> callback = FP8EmulationCallback("delayed(amax_history_len=16)", last_layers_bf16=1)
    """

    def __init__(
        self,
        recipe: str | Mapping[str, Any] = "delayed",
        layers: Sequence[str] = ("layers.*",),
        first_layers_bf16: int = 0,
        last_layers_bf16: int = 0,
        plan: AnyPlan | None = None,
    ) -> None:
        """
        Args:
            recipe: the FP8 recipe: a name, perhaps with options (`delayed(amax_history_len=16)`, `current-e5m2`, `mxfp8`),
                or a dict (`{"name": "delayed", "margin": 1}`).
            layers: GEMMs to quantize, a list of patterns as in `Config.layers`. By default, all GEMMs of transformer layers,
                but not the output layer, as when Megatron trains in FP8.
            first_layers_bf16: number of first transformer layers that stay in BF16. An int, at least 0.
            last_layers_bf16: number of last transformer layers that stay in BF16. An int, at least 0.
            plan: changes to the casts of some operands: a `Plan`, the path of its file, or None. If `nemo-fp8-debug rescue`
                started the run, the plan of `rescue` is used instead.

        Raises:
            ConfigError: on construction or before the first step, if a value cannot be used, no GEMM matches, the plan names
                no quantized GEMM, or a GEMM has its own FP8.
        """
        super().__init__()
        self._recipe = parse_recipe(recipe)
        check_strings("layers", layers)
        self._layers = list(layers)
        ends = {"first_layers_bf16": first_layers_bf16, "last_layers_bf16": last_layers_bf16}
        self._ends = tuple(check_number(name, value, 0) for name, value in ends.items())
        compile_layer_patterns(self._layers)
        self.plan = read_plan(plan)

    def _attached(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Emulation:
        gemms = drop_end_layers(
            require_matching_gemms(find_gemms(find_root_modules(trainer, pl_module)), self._layers), *self._ends
        )
        plan = read_plan_in_force(self.plan) or NO_CHANGES
        check_changes_name_gemms(plan, gemms, "that this run quantizes")
        emulation = Emulation.from_gemms(gemms, self._recipe, plan)
        emulation.attach()
        return emulation


@reject_unknown_arguments()
class FP8PlanCallback(_Intervention):
    """A Lightning callback that applies a plan: it changes casts of Transformer Engine or of `FP8EmulationCallback`.

    Without a plan, the callback does nothing, unless `nemo-fp8-debug rescue` started the run.

    Example:
        >>> from nemo_fp8_debug import Change, FP8PlanCallback, Plan
        >>> callback = FP8PlanCallback(Plan([Change("decoder.layers.3.mlp.linear_fc2", "bf16")]))
    """

    def __init__(self, plan: AnyPlan | None = None) -> None:
        """
        Args:
            plan: a `Plan`, the path of its file, or None for no changes. If `nemo-fp8-debug rescue` started the run, the
                plan of `rescue` is used instead.

        Raises:
            ConfigError: on construction or before the first step, if the plan cannot be read, names no GEMM that Transformer
                Engine runs, or contains a change that Transformer Engine cannot make.
        """
        super().__init__()
        self._plan = read_plan(plan)

    def _attached(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> EngineChanges | None:
        if any(isinstance(c, FP8EmulationCallback) for c in trainer.callbacks):  # type: ignore[attr-defined]
            return None
        return apply_plan(find_root_modules(trainer, pl_module), self._plan)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Pass the plan to the callback that emulates FP8, if there is one."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, FP8EmulationCallback) and self._plan:
                callback.plan = self._plan
