"""What is fuzzed: each target takes an example and a folder of its own, and breaks no promise."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from nemo_fp8_debug import Config, ConfigError, RecordError
from nemo_fp8_debug.analysis.bands.bands import SHIPPED, HealthyBands
from nemo_fp8_debug.analysis.checkpoint.audit import audit
from nemo_fp8_debug.cli.steer import _print_status, _read_status
from nemo_fp8_debug.core.layer_names import compile_layer_patterns
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.options.control_file import FIELDS, ControlSettings
from nemo_fp8_debug.options.loggers import parse_loggers
from nemo_fp8_debug.options.trigger_rules import parse_trigger_rule
from nemo_fp8_debug.plan.plan import Plan
from nemo_fp8_debug.record.imports import import_logs
from nemo_fp8_debug.record.storage import FolderStorage

from . import record_targets, tab_targets
from .limits import expect
from .mutations import json_values, mutated, words

CORPUS = Path(__file__).with_name("corpus")


@dataclass(frozen=True)
class Target:
    """A parser."""

    examples: st.SearchStrategy[Any]
    #: takes an example and an empty folder
    run: Callable[[Any, Path], None]
    #: examples in CI: few of those that take long
    examples_in_ci: int = 100


def seeds(name: str) -> list[bytes]:
    """What the corpus has for a target."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def _control(content: bytes, folder: Path) -> None:
    with expect(ConfigError):
        control = ControlSettings.parse(content.decode(errors="replace"))
        assert ControlSettings.from_plain_values(json.loads(json.dumps(control.plain_values))) == control
        control.describe_settings()


def _plan(content: bytes, folder: Path) -> None:
    (folder / "plan.json").write_bytes(content)
    with expect(ConfigError):
        plan = Plan.load(folder / "plan.json")
        plan.change_of("layers.3.fc1", "input")
        (folder / "again.json").write_text(plan.text())
        assert Plan.load(folder / "again.json") == plan


def _plan_values(content: object, folder: Path) -> None:
    _plan(json.dumps({"version": 1, "changes": content}).encode(), folder)


def _checkpoint(name: str, content: bytes, folder: Path) -> None:
    (folder / name).write_bytes(content)
    with expect(RecordError, ConfigError):
        audit(folder if name.startswith(".") else folder / name)


def _log(name: str, content: bytes, folder: Path) -> None:
    (folder / "log").mkdir()
    (folder / "log" / name).write_bytes(content)
    with warnings.catch_warnings(), expect(RecordError, ConfigError):
        warnings.simplefilter("ignore")
        import_logs(folder / "log", folder / "record")


def _bands(content: bytes, folder: Path) -> None:
    (folder / "bands.parquet").write_bytes(content)
    with expect(RecordError):
        HealthyBands.read(folder / "bands.parquet")


def _status_file(content: bytes, folder: Path) -> None:
    (folder / "status.json").write_bytes(content)
    with expect(RecordError):
        _read_status(FolderStorage(folder))
        _print_status(FolderStorage(folder))


def _status_values(content: object, folder: Path) -> None:
    _status_file(json.dumps(content).encode(), folder)


def _option(given: tuple[str, Any], folder: Path) -> None:
    name, value = given
    with expect(ConfigError):
        Config(**{name: value})


def _text(parse: Callable[[Any], Any], value: Any, folder: Path) -> None:
    with expect(ConfigError):
        parse(value)


def _pattern(text: str, folder: Path) -> None:
    with expect(ConfigError):
        compile_layer_patterns([text])("decoder.layers.3.mlp.linear_fc1")


_NVDLFW = "nvdlfw_inspect_globalrank-0.log"
_RECIPES = ("delayed", "current", "mxfp8", "current-e4m3", "delayed(margin=1)", "bf16", "nvfp4", "blockwise", "hybrid")
_RULES = ("loss_spike", "nonfinite", "underflow_pct > 20", "sqnr_db/input < 15", "mse>1e-3", "early_warning")
_OPTIONS = (*FIELDS, "triggers", "trigger_steps", "loggers", "states", "dump", "dump_max_bytes", "output_rows", "on_error")
_CHANGES = ("layer", "recipe", "roles", "why", "multiply_in_bf16", "layers.*", "input", *_RECIPES)
_STATUS = ("control", "dump", "step", "time", "ended", "first_step", "left_out", "bytes", "tensors")

TARGETS: dict[str, Target] = {
    "control file": Target(mutated(seeds("control")), _control),
    "plan": Target(mutated(seeds("plan")), _plan),
    "plan's values": Target(json_values(_CHANGES), _plan_values),
    "torch file": Target(mutated(seeds("torch")), functools.partial(_checkpoint, "weights.pt")),
    "safetensors": Target(mutated(seeds("safetensors")), functools.partial(_checkpoint, "weights.safetensors")),
    "distributed checkpoint": Target(mutated(seeds("metadata")), functools.partial(_checkpoint, ".metadata")),
    "log of Transformer Engine": Target(mutated(seeds("nvdlfw")), functools.partial(_log, _NVDLFW)),
    "log of msprobe": Target(mutated(seeds("msprobe")), functools.partial(_log, "actv_0-1.csv")),
    "bands": Target(mutated([SHIPPED.read_bytes()]), _bands),
    "status": Target(mutated(seeds("status")), _status_file),
    "status's values": Target(json_values(_STATUS), _status_values),
    "recipe": Target(st.one_of(words(_RECIPES), json_values(("name", *_RECIPES))), functools.partial(_text, parse_recipe)),
    "trigger": Target(st.one_of(words(_RULES), json_values(_RULES)), functools.partial(_text, parse_trigger_rule)),
    "pattern": Target(words(("layers.*", "*.fc1", "re:fc[12]$")), _pattern),
    "loggers": Target(json_values(("wandb", "mlflow", "comet", "project")), functools.partial(_text, parse_loggers)),
    "options": Target(st.tuples(st.sampled_from(_OPTIONS), json_values(_RECIPES + _RULES)), _option),
    **{name: Target(*of) for name, of in (*record_targets.TARGETS.items(), *tab_targets.TARGETS.items())},
}
