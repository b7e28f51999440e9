"""Real megatron-core in every layout: the record is that of the whole tensors, whichever way they are spread over ranks.

What the record must be is found in two ways. The operands that hooks of our own kept on every rank are put together as the
layout splits them, and counted by hand; and they, and the record, are compared with those of one process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl
import pytest
import torch
from layouts import BY_NAME, LAYOUTS, SPREAD, STEPS, TWICE, WATCHED, Layout, sequences
from long import long_but
from processes import run_script
from products import errors, metrics_of, quantized

from nemo_fp8_debug.core.keys import STATES
from nemo_fp8_debug.record.reader import find_record, read_table_rows

Key = tuple[str, str]
#: what every layout computes alike, down to the last bit: nothing before it was added up over ranks
UNTOUCHED = {
    ("decoder.layers.0.self_attention.linear_qkv", "input"),
    ("decoder.layers.0.self_attention.linear_proj", "input"),
}
#: layouts that are trained whenever tests are run
LIVE = [BY_NAME[name] for name in ("dense", "tp-sp", "pp-vpp", "dp-sharded", "experts", "ep")]


def of(layouts: Sequence[Layout]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("layout", long_but(LIVE, layouts), ids=lambda layout: layout.name)


of_all, of_spread = of(LAYOUTS), of(SPREAD)
of_watched = pytest.mark.parametrize("watched", WATCHED)


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layouts, each unwatched and watched."""
    folder = tmp_path_factory.mktemp("layouts")
    names = [layout.name for layout in (LAYOUTS if request.config.getoption("--long") else LIVE)]
    run_script(Path(__file__).with_name("megatron_ranks.py"), folder, *names)
    return folder


def like(layout: Layout) -> str:
    """The layout of one process that has the same model."""
    return "experts" if layout.experts else "dense"


class Whole:
    """The operands of a layout, put together from those that each rank kept."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.layout = layout
        files = sorted((folder / layout.name / "kept").glob("kept-*.pt"))
        self._ranks = [torch.load(file, weights_only=True) for file in files]

    @property
    def keys(self) -> set[Key]:
        return {key for rank in self._ranks for key in rank["steps"][0]}

    def of(self, step: int, key: Key) -> tuple[list[torch.Tensor], int]:
        """The whole tensor of each call, in any order, and how many ranks hold parts of it that are not copies."""
        name, role = key
        expert = "local_experts" in name
        tensor, data = ("etp", "edp") if expert else ("tp", "dp")
        held = {
            (r["ranks"][data], r["ranks"][tensor]): r["steps"][step][key] for r in self._ranks if key in r["steps"][step]
        }
        replicas, parts = ({place[i] for place in held} for i in (0, 1))
        split = self._split(name, role, expert)
        calls = [
            self._joined([held[replica, part][call] for part in sorted(parts)], split)
            for replica in sorted(replicas)
            for call in range(len(held[replica, 0]))
        ]
        holders = 1 if split is None else len(parts)
        if role != "weight":
            return calls, holders * len(replicas)
        assert all(torch.equal(w, calls[0]) for w in calls)
        return calls[:1], holders

    def multiplied(self, step: int, name: str) -> list[dict[str, torch.Tensor]]:
        """What each rank multiplies in its first call of a GEMM that has tokens, by role."""
        found = []
        for kept in (r["steps"][step] for r in self._ranks if (name, "input") in r["steps"][step]):
            with_tokens = [i for i, x in enumerate(kept[name, "input"]) if x.numel()]
            if with_tokens:
                x, dy = (kept[name, role][with_tokens[0]] for role in ("input", "grad_output"))
                found.append({"input": x, "weight": kept[name, "weight"][0], "grad_output": dy})
        return found

    def _split(self, name: str, role: str, expert: bool) -> int | None:
        """The dimension that tensor-parallel ranks have parts of; None: they have copies."""
        # Experts' tokens are gathered before them, and so are those of shared experts that overlap with the others.
        together = "local_experts" in name or ("shared_experts" in name and self.layout.overlaps)
        of_sequence = 0 if self.layout.of_sequence and not together else None
        row = name.endswith(("linear_proj", "linear_fc2"))
        if role == "weight":
            return 1 if row else 0
        by_features = role == ("input" if row else "grad_output")
        return -1 if by_features else of_sequence

    def _joined(self, parts: Sequence[torch.Tensor], split: int | None) -> torch.Tensor:
        if split is not None:
            return torch.cat(list(parts), split)
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]


def counted(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Occupied bins of a histogram, by hand: how often each magnitude of BF16 occurs."""
    bits = torch.cat([t.flatten() for t in tensors]).view(torch.int16) & 0x7FFF
    bins, counts = bits.unique(return_counts=True)
    return dict(zip(bins.tolist(), counts.tolist(), strict=True))


def record(folder: Path, name: str, watched: str, table: str = "metrics") -> pl.DataFrame:
    """Rows of a table; those of all experts of a layer as one are tested elsewhere."""
    rows = read_table_rows(find_record(folder / name / watched), table).sort(["step", "layer", "role"])
    return rows.filter(~pl.col("layer").str.contains("*", literal=True))


def histograms(folder: Path, name: str, watched: str) -> dict[tuple[int, str, str], dict[int, int]]:
    rows = record(folder, name, watched, "histograms").select("step", "layer", "role", "bins", "counts").rows()
    return {(step, layer, role): dict(zip(bins, counts, strict=True)) for step, layer, role, bins, counts in rows}


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def apart(mine: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """The norm of the difference; calls in the order in which they are closest."""
    if len(mine) == 2 and mine[0].shape == other[1].shape == mine[1].shape:
        return min(_norm([a.double() - b.double() for a, b in zip(mine, o, strict=True)]) for o in (other, other[::-1]))
    return _norm([a.double() - b.double() for a, b in zip(mine, other, strict=True)])


def sorted_values(bins: Mapping[int, int]) -> torch.Tensor:
    """Magnitudes of all values of a histogram, ascending."""
    found = torch.tensor(sorted(bins), dtype=torch.int16).view(torch.bfloat16).double()
    return found.repeat_interleave(torch.tensor([bins[b] for b in sorted(bins)]))


def assert_same(mine: pl.DataFrame, its: pl.DataFrame) -> None:
    """All metrics are equal to the last bit, but those of errors, which ranks may add up in another order."""
    errors = ["mse", "unscaled_mse", "relative_error", "sqnr_db", "cosine"]
    several = ["ranks", "calls"]
    assert len(mine) > 0
    assert mine.drop(several + errors).equals(its.drop(several + errors))
    for name in errors:
        found, expected = (frame[name].fill_null(math.nan).to_list() for frame in (mine, its))
        assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)


@of_all
def test_training_is_bit_identical_with_and_without_the_monitor(trained: Path, layout: Layout) -> None:
    for rank in range(layout.world):
        found = json.loads((trained / f"results-{layout.world}-{rank}.json").read_text())[layout.name]
        assert len(found["kept"]["losses"]) == STEPS
        for watched in WATCHED:
            assert found[watched] == found["kept"]


@of_watched
@of_all
def test_the_record_counts_each_value_of_the_whole_tensors_once(trained: Path, layout: Layout, watched: str) -> None:
    whole, found = Whole(trained, layout), histograms(trained, layout.name, watched)
    rows = record(trained, layout.name, watched).select("step", "layer", "role", "ranks", "ranks_missing", "n").rows()
    assert set(found) == {(step, *key) for step in range(STEPS) for key in whole.keys}
    assert set(found) == {(step, layer, role) for step, layer, role, *_ in rows} and len(rows) == len(found)
    for step, layer, role, *counts in rows:
        tensors, holders = whole.of(step, (layer, role))
        assert found[step, layer, role] == counted(tensors), (step, layer, role)
        assert counts == [holders, 0, sum(t.numel() for t in tensors)], (step, layer, role)


@of_all
def test_errors_of_outputs_are_those_of_what_each_rank_multiplies(trained: Path, layout: Layout) -> None:
    """Each operand under the scale of what the rank has of it; where it has parts that do not belong together, nothing."""
    whole, found = Whole(trained, layout), read_table_rows(find_record(trained / layout.name / "auto"), "outputs").to_dicts()
    rows = {(row["step"], row["layer"], row["product"]): row for row in found if "*" not in row["layer"]}
    expected = {}
    for step, name in {(step, name) for step in range(STEPS) for name, _ in whole.keys}:
        parts = whole.multiplied(step, name)
        of_ranks = [(given, {role: quantized(x, role) for role, x in given.items()}) for given in parts]
        for product, of in errors(of_ranks).items():
            expected[step, name, product] = (len(parts), of)
    assert set(rows) == set(expected)
    assert {product for *_, product in rows} >= {"fprop", "dgrad"}
    for key, (stats, of) in expected.items():
        assert rows[key]["ranks"] == stats, key
        assert metrics_of(rows[key]) == pytest.approx(of, rel=1e-4), key


@of_all
def test_what_gemms_returned_is_the_product_of_their_operands(trained: Path, layout: Layout) -> None:
    """On every rank, but for dW of what sequence parallelism gathers inside the module: no rank has both its operands."""
    found = read_table_rows(find_record(trained / layout.name / "delayed"), "verification").filter(
        pl.col("product") != "reduction"
    )
    assert set(found["step"]) == set(range(STEPS)) and not found["ranks_beyond"].sum()
    unknown = found.filter(pl.col("outcome") == "unknown")
    assert found.filter(pl.col("outcome") == "within")["error_over_bound"].is_between(0, 1).all()
    if not layout.of_sequence:
        assert unknown.is_empty()
        return
    assert set(unknown["product"]) == {"wgrad"} and all("gathered inside" in why for why in unknown["reason"])
    gathered = {"linear_qkv", "linear_proj", "output_layer"} | (set() if layout.experts else {"linear_fc1", "linear_fc2"})
    assert gathered <= set(unknown["gemm"])


@of_all
def test_reduced_gradients_are_the_sums_of_what_ranks_computed(trained: Path, layout: Layout) -> None:
    """Under sequence parallelism too, and with parts that ranks of a distributed optimizer keep; `cp` reduces nothing."""
    found = read_table_rows(find_record(trained / layout.name / "delayed"), "verification")
    rows = found.filter(product="reduction")
    assert set(rows["layer"]) == set(found["layer"]) and set(rows["step"]) == set(range(STEPS))
    if layout.name == "cp":
        assert set(rows["reason"]) == {"it is unknown how ranks add up its gradient"}
        return
    assert set(rows["outcome"]) == {"within"} and rows["values"].min() == 64
    ranks = layout.world // math.prod(
        size for name, size in layout.groups.items() if name.split("_")[0] in ("tensor", "pipeline")
    )
    assert set(rows.filter(~pl.col("layer").str.contains("local_experts"))["ranks"]) == {ranks}


@pytest.mark.parametrize("name", long_but(["dp-sharded"], ["dp", "dp-sharded"]))
def test_a_gradient_that_megatron_averages_twice_is_named(trained: Path, name: str) -> None:
    """Of one layer, in a run that clips: by what all gradients have in common."""
    found = read_table_rows(find_record(trained / name / "twice"), "verification").filter(outcome="beyond")
    assert found.select("step", "product").rows() == [(STEPS - 1, "reduction")]
    assert TWICE in found["layer"][0] and found["factor"][0] == pytest.approx(0.5, rel=1e-3)


@of_all
def test_copies_of_a_run_that_goes_well_are_equal(trained: Path, layout: Layout) -> None:
    """Ranks of data parallelism have copies of W, and of its gradient unless the optimizer shards it; ranks of tensor
    parallelism have copies of X unless they split the sequence."""
    found = read_table_rows(find_record(trained / layout.name / "delayed"), "replicas")
    outcomes = {what: set(found.filter(what=what)["outcome"]) for what in found["what"].unique()}
    assert "apart" not in set().union(*outcomes.values())
    if layout.name in ("dp", "dp-sharded", "dp-gathered-late", "cp"):
        assert outcomes["weight"] == {"equal"}
    if layout.name in ("tp", "tp-pp"):
        assert outcomes["input"] == {"equal"} and outcomes["weight"] == {"no copy"}
    if layout.name == "dp":
        assert outcomes["weight_gradient"] == {"equal"}
    if outcomes and layout.name != "cp":  # which has no optimizer
        assert outcomes["master"] == {"equal"}
    if layout.ddp.get("use_distributed_optimizer"):
        assert "equal" not in outcomes.get("weight_gradient", set())


@of([found for found in SPREAD if found.noise == 0])
def test_optimizer_states_are_those_of_one_process(trained: Path, layout: Layout) -> None:
    """Whole, or put together from the parts that ranks of a distributed optimizer keep."""
    mine, its = (read_table_rows(find_record(trained / name / "auto"), "states") for name in (layout.name, like(layout)))
    keys = ["step", "layer", "role", "recipe"]
    both = mine.join(its, on=keys, suffix="_of_one", how="full", coalesce=True).filter(pl.col("step") < layout.alike)
    assert set(its["role"]) == set(STATES) and set(its["recipe"]) == {"current-hybrid", "current-e5m2", "mxfp8-e4m3"}
    known = both.filter(~pl.col("layer").str.contains("experts"))
    assert len(known) and not known["n_of_one"].is_null().any()
    assert known["n"].equals(known["n_of_one"].alias("n")) and known["amax"].equals(known["amax_of_one"].alias("amax"))
    if layout.ddp.get("use_distributed_optimizer"):
        return  # parts have scales of their own, and blocks that end where they do
    for metric in ("underflow_pct", "relative_error", "kurtosis"):
        assert known[metric].to_list() == pytest.approx(known[f"{metric}_of_one"].to_list(), rel=1e-9)


@of_spread
def test_activations_are_those_of_one_process(trained: Path, layout: Layout) -> None:
    """Each counted once: tensor-parallel ranks have copies of what norms are given, or parts of the sequence; heads of
    their own; and data-parallel ranks tokens of their own."""
    mine, its = (
        read_table_rows(find_record(trained / name / "auto"), "activations") for name in (layout.name, like(layout))
    )
    roles = {"norm_input", "norm_output", "attention_logits", *({"router_logits"} if layout.experts else ())}
    keys, first = ["layer", "role"], (pl.col("step") == 0) & (pl.col("scale_source") != "what-if")
    both = mine.filter(first).join(its.filter(first), on=keys, suffix="_of_one", how="full", coalesce=True)
    assert set(both["role"]) == roles and not both["n"].is_null().any() and not both["n_of_one"].is_null().any()
    assert both["n"].equals(both["n_of_one"].alias("n")) and both["rows"].equals(both["rows_of_one"].alias("rows"))
    for metric in ("amax", "kurtosis", "channel_ratio", "entropy", "sink_pct", "load_ratio", "dropped_pct"):
        known = both.drop_nulls(f"{metric}_of_one")
        assert len(known) or (metric in ("load_ratio", "dropped_pct") and not layout.experts)
        noise = 1e-9 if layout.noise == 0 else 10 * layout.noise if metric == "kurtosis" else 3 * layout.noise
        assert known[metric].to_list() == pytest.approx(known[f"{metric}_of_one"].to_list(), rel=noise, abs=noise), metric


@of_spread
def test_operands_are_those_of_one_process_but_for_the_noise_of_the_layout(trained: Path, layout: Layout) -> None:
    """Sorting brings two sets of values as close as they get, so that histograms may not be further apart than the
    tensors."""
    whole, one = Whole(trained, layout), Whole(trained, BY_NAME[like(layout)])
    mine, its = (histograms(trained, name, "auto") for name in (layout.name, like(layout)))
    assert set(mine) == set(its)
    for step, name, role in [found for found in mine if found[0] < layout.alike]:
        here, there, key = mine[step, name, role], its[step, name, role], (name, role)
        if layout.noise == 0 or (step == 0 and (role == "weight" or key in UNTOUCHED)):
            assert here == there, (step, *key)
        elif "local_experts" not in name:
            (tensors, _), (others, _) = whole.of(step, key), one.of(step, key)
            distance = apart(tensors, others)
            assert distance <= layout.noise * _norm(others), (step, *key)
            assert float((sorted_values(here) - sorted_values(there)).norm()) <= distance * (1 + 1e-9), (step, *key)


@of_watched
@of_spread
def test_metrics_are_those_of_one_process(trained: Path, layout: Layout, watched: str) -> None:
    mine, its = (record(trained, name, watched) for name in (layout.name, like(layout)))
    keys = ["step", "layer", "gemm", "role", "recipe", "format", "dtype", "scale_source"]
    assert mine.select(keys).equals(its.select(keys))
    exact = (pl.col("step") < layout.alike) if layout.noise == 0 else (pl.col("step") == 0) & (pl.col("role") == "weight")
    assert_same(mine.filter(exact), its.filter(exact))
    # A token may go to another expert, where two try nearly the same for it; what all of them get together stays.
    counts = [pl.sum(name) for name in ("n", "nan", "inf")]
    dense = pl.when(pl.col("layer").str.contains("local_experts")).then(pl.col("gemm")).otherwise(pl.col("layer"))
    totals = [f.group_by("step", dense.alias("of"), "role").agg(counts).sort("step", "of", "role") for f in (mine, its)]
    assert totals[0].equals(totals[1])


@of_spread
def test_recipes_that_are_what_if(trained: Path, layout: Layout) -> None:
    """Operand statistics end where blocks of 32 values do, so that those of W are the same."""
    order = ["step", "layer", "role", "recipe"]
    mine, its = (record(trained, name, "auto", "what_if").sort(order) for name in (layout.name, like(layout)))
    assert mine.select(order).equals(its.select(order))
    assert set(mine["recipe"]) == {"current-e5m2", "mxfp8-e4m3"}
    weights = (pl.col("role") == "weight") & (pl.col("step") < (1 if layout.noise else layout.alike))
    assert_same(mine.filter(weights), its.filter(weights))


@pytest.mark.long
def test_parts_of_a_sequence_are_counted_on_both_ranks_and_weights_on_one(trained: Path) -> None:
    found, rows = histograms(trained, "cp", "auto"), record(trained, "cp", "auto").to_dicts()
    for step in range(STEPS):
        assert found[step, "linear_fc1", "input"] == counted([sequences(step)])
    assert {(row["role"], row["ranks"]) for row in rows} == {("input", 2), ("weight", 1), ("grad_output", 2)}


def test_the_loss_of_the_last_stage_is_recorded(trained: Path) -> None:
    losses = json.loads((trained / "results-2-1.json").read_text())["pp-vpp"]["auto"]["losses"]
    assert read_table_rows(find_record(trained / "pp-vpp" / "auto"), "steps").sort("step")["loss"].to_list() == losses


@of_all
def test_norms_of_gradients_are_those_of_exact_products(trained: Path, layout: Layout) -> None:
    """Of all micro-batches and ranks, before gradients are divided by the tokens of a step."""
    rows = read_table_rows(find_record(trained / layout.name / "delayed"), "gradients")
    if layout.name == "cp":  # without Megatron's DDP nobody adds up what the two ranks have
        assert rows.is_empty()
        return
    whole = Whole(trained, layout)
    found = {(row["step"], row["layer"]): row for row in rows.iter_rows(named=True)}
    names = {name for name, _ in whole.keys}
    assert {name for _, name in found} >= names
    for step, name in ((step, name) for step in range(STEPS) for name in names):
        x, dy = ([t.double().flatten(0, -2) for t in whole.of(step, (name, role))[0]] for role in ("input", "grad_output"))
        exact = sum((b.T @ a for a, b in zip(x, dy, strict=True)), torch.zeros(dy[0].shape[-1], x[0].shape[-1]).double())
        row = found[step, name]
        assert row["norm"] == pytest.approx(float(exact.norm()), rel=2e-2), (step, name)
        assert (row["elements"], row["nonfinite"]) == (exact.numel(), 0)
