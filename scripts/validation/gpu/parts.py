"""The parts of the command: what each runs, what it needs, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass

#: megatron-core's names of recipes
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
#: of these, what the emulated engine has
EMULATED_RECIPES = ("delayed", "tensorwise")
#: what torchao alone has among these parts
TORCHAO_RECIPE = "nvfp4"

#: stands for what nemo_fp8_debug itself requires
OWN = "the package"
#: modules that kernels need, and those that a GPT needs besides the package's own requirements
KERNELS = ("torch", "numpy", "numba")
TORCHAO = (*KERNELS, "torchao", "triton")
GPT = (*KERNELS, OWN, "transformer_engine", "megatron.core")


@dataclass(frozen=True)
class Part:
    """One process of its own."""

    name: str
    #: of this package; its `run(part, emulate)` gives the numbers
    module: str
    #: what it proves, for the tables
    title: str
    #: modules
    needs: tuple[str, ...]
    #: seconds, after which it is ended
    limit: float
    recipe: str | None = None

    @property
    def kind(self) -> str:
        """Its name, whatever the recipe."""
        return self.name.replace(f"-{self.recipe}", "-RECIPE")

    @property
    def compares_losses(self) -> bool:
        """Whether it asks for losses that are the same bit by bit."""
        return self.module == "training"

    def needed(self, emulate: bool) -> tuple[str, ...]:
        """What it needs on a GPU, or on a CPU; kernels run in Numba's simulator there."""
        if emulate and self.recipe not in (None, *EMULATED_RECIPES):
            return ()
        on_device = self.module == "kernels" and not emulate
        return (*self.needs, *(("numba_cuda",) if on_device else ()))


def _of_recipe(recipe: str) -> tuple[Part, ...]:
    return (
        Part(f"train-{recipe}", "training", "losses, scales and metrics of a GPT in real FP8", GPT, 500, recipe),
        Part(f"products-{recipe}", "products", "what GEMMs return, beside the exact product", GPT, 400, recipe),
        Part(f"overhead-{recipe}", "overhead", "what the monitor costs its steps", GPT, 500, recipe),
        Part(
            f"te-statistics-{recipe}",
            "te_statistics",
            "Transformer Engine's own statistics beside ours",
            (*GPT, "nvdlfw_inspect"),
            500,
            recipe,
        ),
    )


PARTS = (
    Part("counts", "kernels", "the kernel that counts, against the device's copy", KERNELS, 240),
    Part("block-sums", "kernels", "the kernel of block sums, against the device's copy", KERNELS, 400),
    Part("float32", "kernels", "the kernels of float32, against the device's copy", KERNELS, 240),
    Part(
        "transfer",
        "transfer",
        "histograms that come to the host, against the device's",
        KERNELS,
        240,
    ),
    *(part for recipe in RECIPES for part in _of_recipe(recipe)),
    Part(
        "torchao-nvfp4",
        "torchao_nvfp4",
        "codes and scales of torchao's NVFP4 kernels beside ours",
        TORCHAO,
        400,
        TORCHAO_RECIPE,
    ),
)
