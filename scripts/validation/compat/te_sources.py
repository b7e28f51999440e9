"""For version_matrix.py: does a release of Transformer Engine have what the package's host reads? It is read, not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Names:
    """Names that the host reads, and the class that has to define them."""

    #: below transformer_engine/; where a release keeps the class elsewhere, the first that exists
    files: tuple[str, ...]
    owner: str
    names: tuple[str, ...]


MANAGER = ("pytorch/quantization.py", "pytorch/fp8.py")
NORM = ("layer_norm_weight", "layer_norm_bias", "eps", "normalization", "zero_centered_gamma", "return_layernorm_output")
READ = (
    Names(MANAGER, "FP8GlobalStateManager", ("is_fp8_enabled", "get_fp8_recipe")),
    Names(("pytorch/module/base.py",), "TransformerEngineBaseModule", ("fp8", "fp8_meta", "_fp8_workspaces")),
    Names(("pytorch/module/layernorm_linear.py",), "LayerNormLinear", NORM),
    Names(("pytorch/module/layernorm_mlp.py",), "LayerNormMLP", ("fc1_weight", "fc2_weight", *NORM[:-1])),
    Names(("pytorch/module/grouped_linear.py",), "GroupedLinear", ("num_gemms", "_offsets")),
)
#: what all quantizers have, in whichever file a release defines it
LAYOUT = {"rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm"}
#: the class that holds a direction's scales; before 2.0 it is compiled, and its `scale` is set from Python
STATE = Names(MANAGER, "DelayedScalingRecipeState", ("scale",))


def missing_names(root: Path) -> Iterator[str]:
    """Names that the host reads and this release does not define."""
    for wanted in READ:
        defined = names_of(parsed(root, wanted.files), wanted.owner)
        yield from (f"no {wanted.owner}.{name}" for name in wanted.names if name not in defined)
    base = parsed(root, READ[1].files)
    if "scale" not in names_of(parsed(root, STATE.files), STATE.owner) and "fp8_meta[].scale" not in stored(base):
        yield "no scale in the state of a direction"


def parsed(root: Path, files: Sequence[str]) -> ast.Module:
    """The first of the files that has the class; older releases have not all of them, newer ones shims."""
    path = next(root / name for name in files if (root / name).exists())
    return ast.parse(path.read_text())


def names_of(tree: ast.AST, owner: str) -> set[str]:
    """Methods, class attributes, and attributes that are set in methods."""
    found: set[str] = set()
    for node in class_of(tree, owner):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # parameters are registered and set by name
    return found


def class_of(tree: ast.AST, owner: str) -> Iterator[ast.AST]:
    """All nodes of a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            yield from ast.walk(node)


def stored(tree: ast.AST) -> set[str]:
    """Attributes of members that are assigned to, as in `self.fp8_meta[key].scale = ...`."""
    return {
        f"{node.value.value.attr}[].{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Subscript)
        and isinstance(node.value.value, ast.Attribute)
    }


def wrong_layouts(root: Path) -> Iterator[str]:
    """Orders of slots that are not what the host takes them to be."""
    mlp = parsed(root, ("pytorch/module/layernorm_mlp.py",))
    by_debug = "_get_debug_quantizers" in names_of(mlp, "LayerNormMLP")
    expected = "GRAD_OUTPUT2" if by_debug else "GRAD_OUTPUT1"
    if (found := fc2_grad_slot(mlp)) != expected:
        yield f"dY of LayerNormMLP's fc2 is {found}, the host expects {expected}"
    grouped = parsed(root, ("pytorch/module/grouped_linear.py",))
    if not {"input", "weight", "grad_output"} <= keys_of(grouped, "_offsets"):
        yield "GroupedLinear._offsets lacks a role"
    strides = keys_of(grouped, "_num_fp8_tensors_per_gemm")
    if strides and not {"fwd", "bwd"} <= strides:
        yield "GroupedLinear._num_fp8_tensors_per_gemm lacks a direction"


def fc2_grad_slot(tree: ast.AST) -> str | None:
    """The slot of fc2's output gradient: that of its quantizer, or before 2.0 the first one that the backward casts into."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and "fc2" in node.targets[0].id:
            slots = _slots(node.value)
            if slots:
                return slots[0]
    backward = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name == "backward"]
    return next((slot for function in backward for slot in _slots(function)), None)


def _slots(tree: ast.AST) -> list[str]:
    named = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.startswith(("GRAD_OUTPUT", "GRAD_INPUT")))
    return [node.attr for node in sorted(named, key=lambda n: (n.lineno, n.col_offset))]


def keys_of(tree: ast.AST, attribute: str) -> set[str]:
    """Keys of a literal dictionary that is assigned to `self.ATTRIBUTE`; empty where there is none."""
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Attribute) and target.attr == attribute and isinstance(node.value, ast.Dict):  # type: ignore[union-attr]
            return {key.value for key in node.value.keys if isinstance(key, ast.Constant)}  # type: ignore[union-attr]
    return set()


def unknown_attributes(root: Path) -> dict[str, list[str]]:
    """Of each quantizer class that the host knows: attributes of this release that it does not, which make casts unknown."""
    from nemo_fp8_debug.capture.backends.transformer_engine.quantizers import KNOWN

    found: dict[str, list[str]] = {}
    base = root / "pytorch/quantized_tensor.py"
    layout = assigned(ast.parse(base.read_text()), "Quantizer") if base.exists() else set()
    for path in sorted((root / "pytorch/tensor").glob("*.py")):
        tree = ast.parse(path.read_text())
        for owner, known in KNOWN.items():
            if any(class_of(tree, owner)):
                found[owner] = sorted(assigned(tree, owner) - known - layout - LAYOUT)
    return found


def assigned(tree: ast.AST, owner: str) -> set[str]:
    """Attributes that methods of a class assign to `self`."""
    stores = (n for n in class_of(tree, owner) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {node.attr for node in stores if isinstance(node.value, ast.Name) and node.value.id == "self"}
