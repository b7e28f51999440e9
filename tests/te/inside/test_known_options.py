"""All that the installed release has to say about casts is in a list here: what it adds has to be looked at first."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import transformer_engine.pytorch.tensor as te_tensor
from transformer_engine.common import recipe as te_recipe
from transformer_engine.pytorch import quantized_tensor

from nemo_fp8_debug.capture.backends.transformer_engine.environment import KNOWN_VARIABLES, NOT_MEASURED
from nemo_fp8_debug.capture.backends.transformer_engine.quantizers import KNOWN


def test_all_attributes_of_all_quantizers_are_known() -> None:
    """Of the installed release. One that is not here has to be read, or to make casts unknown, before it is listed."""
    modules = [importlib.import_module(f"{te_tensor.__name__}.{m.name}") for m in pkgutil.iter_modules(te_tensor.__path__)]
    classes = {
        cls
        for module in modules
        for cls in vars(module).values()
        if inspect.isclass(cls) and issubclass(cls, quantized_tensor.Quantizer) and cls is not quantized_tensor.Quantizer
    }
    assert {cls.__name__ for cls in classes} == KNOWN.keys()
    layout = attributes_set_by(quantized_tensor.Quantizer)
    assert layout == {"rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm"}
    for cls in classes:
        assert attributes_set_by(cls) - layout <= KNOWN[cls.__name__], cls


def attributes_set_by(cls: type) -> set[str]:
    """Those that methods of a class assign to themselves."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
        if node.value.id == "self" and not node.attr.startswith("__")
    }


#: fields of recipes and their parts that act through quantizers, through the node of a call, or on attention; those of
#: split accumulators change sums and no cast, and those of delayed scaling name a recipe whose scale is read
RECIPE_FIELDS = {
    "DelayedScaling": "margin amax_history_len amax_compute_algo scaling_factor_compute_algo reduce_amax",
    "Float8CurrentScaling": "use_power_2_scales fp8_gemm_fprop fp8_gemm_dgrad fp8_gemm_wgrad",
    "MXFP8BlockScaling": "margin enable_2d_quantization",
    "Float8BlockScaling": "use_f32_scales x_block_scaling_dim w_block_scaling_dim grad_block_scaling_dim "
    "fp8_gemm_fprop fp8_gemm_dgrad fp8_gemm_wgrad",
    "NVFP4BlockScaling": "disable_rht disable_stochastic_rounding disable_2d_quantization row_scaled_activation "
    "nvfp4_4over6 nvfp4_4over6_e4m3_use_256 nvfp4_4over6_err_mode fp4_format",
    "CustomRecipe": "qfactory quantization_alignment",
    "MMParams": "use_split_accumulator",
    "QParams": "power_2_scale amax_epsilon random_hadamard_transform stochastic_rounding fp4_2d_quantization",
}
OF_ALL_RECIPES = {"fp8_format", "fp8_dpa", "fp8_mha", "backward_override"}


def test_all_fields_of_all_recipes_are_known() -> None:
    """Of the installed release: whether one reaches a cast other than by quantizers has to be looked at."""
    found = {name: cls for name, cls in vars(te_recipe).items() if inspect.isclass(cls) and dataclasses.is_dataclass(cls)}
    assert found.keys() == RECIPE_FIELDS.keys()
    for name, cls in found.items():
        assert {field.name for field in dataclasses.fields(cls)} - OF_ALL_RECIPES == set(RECIPE_FIELDS[name].split()), name


def test_all_environment_variables_are_known() -> None:
    root = Path(te_recipe.__file__).parents[2]
    read = re.compile(r"""(?:getenv|environ\.get|environ|_flag|_env)[(\[]\s*f?["'](NVTE_[A-Z0-9a-z_]+)""")
    files = [*(root / "pytorch").rglob("*.py"), *(root / "common").rglob("*.py"), *(root / "debug").rglob("*.py")]
    found = {name for file in files for name in read.findall(file.read_text())}
    assert len(found) > 40
    assert found - KNOWN_VARIABLES - NOT_MEASURED == set()
