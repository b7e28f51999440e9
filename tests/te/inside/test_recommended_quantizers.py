"""A recommended quantizer factory in Transformer Engine's own hands: the file imported, modules trained, casts read."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from emulated_te import CASTS, Cast, te
from host_runs import Block, run, tokens
from recommendations import recommendation
from torch import nn
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
)
from transformer_engine.pytorch.quantization import QuantizerRole, RecipeState

from nemo_fp8_debug import ConfigError, Monitor, name_modules
from nemo_fp8_debug.analysis.recommendation.snippets.te_quantizers import NAME, make_quantizer_snippets
from nemo_fp8_debug.analysis.runs.metrics import MetricsTable
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.record.reader import read_table_rows

BF16 = [("bf16", "bf16")]
E4M3 = [("format", "current-e4m3"), *BF16]
E5M2 = [("format", "current-e5m2"), *BF16]
SHOWN = {"X": "input", "W": "weight", "dY": "grad_output"}
RECIPES = {"delayed": DelayedScaling(margin=1, amax_history_len=4), "current": Float8CurrentScaling()}
OPERANDS = {(layer, role) for layer in ("qkv", "proj") for role in SHOWN}
Ways = Mapping[tuple[str, str], Any]


def step(model: nn.Module, recipe: Any, number: int = 0) -> None:
    with te.autocast(enabled=True, recipe=recipe):
        y = model(tokens(number))
    y.float().square().sum().backward()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Records of a block under Transformer Engine's own recipes."""
    found = {}
    for name, recipe in RECIPES.items():
        torch.manual_seed(0)
        model, folder = Block(), tmp_path_factory.mktemp(name)
        run(folder, model, lambda i, model=model, recipe=recipe: step(model, recipe, i), steps=2, dump=[])
        found[name] = Run.read(folder)
    return found


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """The file of a recommendation, imported by its name as Megatron does."""
    sys.path.insert(0, str(tmp_path))

    def load(run: Run, ways: Ways) -> Any:
        (snippet,), reasons = make_quantizer_snippets(recommendation(run, ways), for_megatron=False)
        assert snippet.name == NAME and not reasons
        (tmp_path / NAME).write_text(snippet.text)
        sys.modules.pop("te_quantizers", None)
        importlib.invalidate_caches()
        return importlib.import_module("te_quantizers")

    yield load
    sys.path.remove(str(tmp_path))
    sys.modules.pop("te_quantizers", None)
    (tmp_path / NAME).unlink(missing_ok=True)


def casts(model: nn.Module) -> dict[tuple[str, str], list[Cast]]:
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[tuple[str, str], list[Cast]] = {}
    for cast in CASTS:
        found.setdefault((names[id(cast.module)], cast.role), []).append(cast)
    return found


def of_kernels(recipe: Any, name: bool = True) -> dict[tuple[str, str], list[Cast]]:
    """What the kernels were given in the second of two steps."""
    torch.manual_seed(0)
    model = Block()
    if name:
        assert name_modules(model) == 2
    step(model, recipe)
    CASTS.clear()
    step(model, recipe, 1)
    return casts(model)


def told(found: list[Cast]) -> list[tuple[str, str, bool]]:
    return [(type(cast.quantizer).__name__, cast.format, cast.in_backward) for cast in found]


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize(
    ("ways", "changed"),
    [
        # An operand that leaves FP8: its two GEMMs do, and the third is what it was.
        ({("proj", "grad_output"): BF16}, {("proj", "dY"): None, ("proj", "X"): "hybrid", ("proj", "W"): "hybrid"}),
        ({("proj", "input"): BF16}, {("proj", "X"): None, ("proj", "W"): "hybrid", ("proj", "dY"): "hybrid"}),
        ({("qkv", "weight"): BF16}, {("qkv", "W"): None, ("qkv", "X"): "hybrid", ("qkv", "dY"): "hybrid"}),
        ({("qkv", "input"): BF16, ("qkv", "weight"): BF16}, {("qkv", r): None for r in SHOWN}),
        ({("proj", "grad_output"): E4M3}, {("proj", "dY"): "e4m3"}),
        ({("qkv", r): [("current", "current-hybrid")] for r in ("input", "weight")}, {("qkv", r): "e4m3" for r in "XW"}),
        # cuBLAS does not multiply E5M2 by E5M2, so that X gets it only together with another format for dY.
        ({("proj", "input"): E5M2}, {("proj", "X"): None, ("proj", "W"): "hybrid", ("proj", "dY"): "hybrid"}),
        (
            {("proj", "input"): E5M2, ("proj", "grad_output"): E4M3},
            {("proj", "X"): "e5m2", ("proj", "dY"): "e4m3"},
        ),
    ],
)
def test_operands_are_cast_as_the_plan_says_and_all_others_as_before(
    runs: dict[str, Run], loaded: Any, recipe: str, ways: Ways, changed: Any
) -> None:
    before = of_kernels(RECIPES[recipe], name=False)
    after = of_kernels(CustomRecipe(qfactory=loaded(runs[recipe], ways).factory))
    assert before.keys() == OPERANDS and after.keys() == OPERANDS - {key for key, how in changed.items() if how is None}
    for key, found in after.items():
        match changed.get(key, "as before"):
            case "as before":
                assert told(found) == told(before[key]), key
                if not any(cast.in_backward for cast in found) and key[0] == "qkv":  # nothing before it has changed
                    pairs = zip(found, before[key], strict=True)
                    assert all(a.scale == b.scale and torch.equal(a.codes, b.codes) for a, b in pairs), key
            case "hybrid":  # one copy is left, in the same format
                assert {(kind, fmt) for kind, fmt, _ in told(found)} == {
                    ("Float8CurrentScalingQuantizer", before[key][0].format)
                }, key
            case fmt:
                assert {(kind, fmt) for kind, fmt, _ in told(found)} == {("Float8CurrentScalingQuantizer", fmt)}, key


def test_a_margin_for_one_direction_of_a_module(runs: dict[str, Run], loaded: Any) -> None:
    """Transformer Engine has one history for X and W: dY alone can have a margin of its own, X takes the next option."""
    wider = "delayed-hybrid(margin=3,amax_history_len=4)"
    ways = {("proj", role): [("margin", wider), ("current", "current-hybrid"), *BF16] for role in ("input", "grad_output")}
    before, after = of_kernels(RECIPES["delayed"], name=False), loaded(runs["delayed"], ways)
    found = of_kernels(CustomRecipe(qfactory=after.factory))
    assert told(found["proj", "X"])[0][0] == "Float8CurrentScalingQuantizer"
    assert {key: told(c) for key, c in found.items() if key != ("proj", "X")} == {
        key: told(c) for key, c in before.items() if key != ("proj", "X")
    }
    quarter = float(found["proj", "dY"][0].scale) / float(before["proj", "dY"][0].scale)
    assert quarter == pytest.approx(0.25, rel=0.1)


def test_experts_of_a_group_are_changed_together(loaded: Any, tmp_path: Path) -> None:
    def grouped() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Module()
        model.add_module("experts", te.GroupedLinear(2, 32, 48, params_dtype=torch.bfloat16, bias=False))
        return model

    def trained(model: nn.Module, recipe: Any) -> None:
        with te.autocast(enabled=True, recipe=recipe):
            y = model.experts(tokens(0), [8, 8])
        y.float().square().sum().backward()

    native = grouped()
    run(tmp_path / "run", native, lambda _: trained(native, Float8CurrentScaling()), steps=1, dump=[])
    found = recommendation(Run.read(tmp_path / "run"), {("experts.1", "grad_output"): BF16})
    (snippet,), _ = make_quantizer_snippets(found, for_megatron=False)
    assert snippet.coarser == ("dY of experts: all experts of the group are cast alike.",)
    factory = loaded(found.run, {("experts.1", "grad_output"): BF16}).factory
    model = grouped()
    assert name_modules(model) == 1
    CASTS.clear()
    trained(model, CustomRecipe(qfactory=factory))
    assert {(cast.role, cast.gemm) for cast in CASTS} == {(role, gemm) for role in ("X", "W") for gemm in (0, 1)}


def test_the_record_of_the_changed_run_says_so(runs: dict[str, Run], loaded: Any, tmp_path: Path) -> None:
    factory, model = loaded(runs["current"], {("proj", "grad_output"): BF16}).factory, Block()
    name_modules(model)
    monitor = Monitor(model, str(tmp_path / "run"), interval=1, table_rows=0, on_error="raise")
    with monitor.step(0):
        step(model, CustomRecipe(qfactory=factory))
    monitor.close()
    rows = read_table_rows(tmp_path / "run", "metrics").filter(scale_source="not quantized").select("layer", "role").rows()
    assert rows == [("proj", "grad_output")]


def test_modules_without_names_are_refused_and_names_are_given_before_the_first_step(
    runs: dict[str, Run], loaded: Any
) -> None:
    module, model = loaded(runs["current"], {("proj", "grad_output"): BF16}), Block()
    with pytest.raises(ValueError, match=r"call nemo_fp8_debug\.name_modules"):
        step(model, CustomRecipe(qfactory=module.factory))
    model = Block()
    name_modules(model)
    step(model, CustomRecipe(qfactory=module.factory))
    with pytest.raises(ConfigError, match="before the first step"):
        name_modules(model)
    with pytest.warns(UserWarning, match="strange is not in the record"):
        module.factory(QuantizerRole("linear", "input", "strange"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.factory(QuantizerRole("linear", "input", "other"))
    assert type(module.factory(QuantizerRole("dpa", "qkv", "attention"))).__name__ == "IdentityQuantizer"


ROWS = {
    "current-hybrid(power_of_two=True,epsilon=0.5)": None,
    "current-e4m3": Float8CurrentScaling(fp8_format=Format.E4M3),
    "current-hybrid": Float8CurrentScaling(),
    "blockwise-e4m3": Float8BlockScaling(),
    "mxfp8-e4m3": MXFP8BlockScaling(),
    "mxfp8-hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "delayed-hybrid(margin=2,amax_history_len=8)": DelayedScaling(margin=2, amax_history_len=8),
}


@pytest.mark.parametrize("name", list(ROWS))
def test_quantizers_of_all_others_are_transformer_engines_own(runs: dict[str, Run], loaded: Any, name: str) -> None:
    """Attribute by attribute, whatever the recipe."""
    metrics = runs["current"].metrics.read_all_rows()
    fmt = {role: "e5m2" if "hybrid" in name and role == "grad_output" else "e4m3" for role in SHOWN.values()}
    rows = metrics.with_columns(metrics["role"].replace_strict(fmt).alias("format"))

    changed = replace(runs["current"], metrics=MetricsTable.from_rows(rows.with_columns(recipe=pl.lit(name))))
    module = loaded(changed, {("proj", "grad_output"): BF16})
    for mode, roles in (("forward", ("input", "weight")), ("backward", ("grad_output",))):
        asked = [QuantizerRole("linear", role, "qkv") for role in roles]
        custom = RecipeState.create(CustomRecipe(qfactory=module.factory), mode=mode, num_quantizers=len(asked), roles=asked)
        mine = custom.make_quantizers()
        if ROWS[name] is None:
            assert all((q.force_pow_2_scales, q.amax_epsilon) == (True, 0.5) for q in mine)
            continue
        theirs = RecipeState.create(ROWS[name], mode=mode, num_quantizers=len(asked), roles=asked).make_quantizers()
        assert list(map(attributes, mine)) == list(map(attributes, theirs))
        if mode == "forward" and name.startswith("delayed"):
            assert (custom._inner_delayed_scaling_recipe.margin, len(custom.amax_history)) == (2, 8)


def attributes(quantizer: Any) -> tuple[type, dict[str, Any]]:
    return type(quantizer), {k: v for k, v in vars(quantizer).items() if not isinstance(v, torch.Tensor)}


def test_nothing_is_written_where_a_cast_was_not_read(tmp_path: Path) -> None:
    model = Block()
    with pytest.warns(match="unknown"):
        run(tmp_path, model, lambda i: step(model, _strange(), i), dump=[])
    files, (reason,) = make_quantizer_snippets(
        recommendation(Run.read(tmp_path), {("proj", "grad_output"): BF16}), for_megatron=False
    )
    assert not files and "te_quantizers.py is not written: W of" in reason and "was not read" in reason


def _strange() -> CustomRecipe:
    """Of a user: its weights are cast by a class that nobody here has seen."""
    from transformer_engine.pytorch.custom_recipes.quantizer_factories import current_scaling_factory
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    class Strange(Float8CurrentScalingQuantizer):
        pass

    def factory(role: Any) -> Any:
        made = current_scaling_factory(role)
        return Strange(made.dtype, device="cpu") if role and role.tensor_type == "weight" else made

    return CustomRecipe(qfactory=factory)
