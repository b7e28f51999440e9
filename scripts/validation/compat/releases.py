"""The releases that version_matrix.py tries, in the order of its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A release of a package to try."""

    package: str
    version: str
    #: what has to be of the same age, or is missing in the environment
    beside: tuple[str, ...] = ()


MEGATRON = ("0.10.0", "0.11.0", "0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1")
#: up to 2.3 it imports pkg_resources, which setuptools had until 81
LIGHTNING = (
    *(Case("lightning", version, ("setuptools<81",)) for version in ("2.1.4", "2.2.5", "2.3.3")),
    *(Case("lightning", version) for version in ("2.4.0", "2.5.6", "2.6.6")),
)
TORCH = ("2.4.1", "2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0")
TRANSFORMER_ENGINE = ("1.13.0", "2.4.0", "2.8.0", "2.14.0", "2.20.2")
#: the release whose kernels scripts/validation/emulated_te emulates
EMULATED = "2.20.2"
#: what NeMo's language models import up to 2.4, by way of its older text models, and 2.5 does without
OLD_NEMO: tuple[str, ...] = (
    *("braceexpand", "webdataset", "h5py", "ijson", "jieba", "opencc", "pangu<5", "nltk", "rouge_score"),
    *("sacrebleu", "portalocker", "colorama", "lxml", "scikit-learn", "threadpoolctl", "narwhals"),
    *("matplotlib", "pyparsing", "cycler", "kiwisolver", "fonttools"),
)
#: with the megatron-core of its time
NEMO = (
    Case("nemo-toolkit", "2.2.1", ("megatron-core==0.11.0", *OLD_NEMO, "zarr<3", "numcodecs<0.16", "asciitree")),
    Case("nemo-toolkit", "2.3.3", ("megatron-core==0.12.3", *OLD_NEMO)),
    Case("nemo-toolkit", "2.4.1", ("megatron-core==0.13.1", *OLD_NEMO)),
    Case("nemo-toolkit", "2.5.3", ("megatron-core==0.13.1",)),
    Case("nemo-toolkit", "2.6.2"),
    Case("nemo-toolkit", "2.7.3"),
)


def cases() -> list[Case]:
    """All rows of the table, in order."""

    def plain(package: str, versions: Sequence[str]) -> list[Case]:
        return [Case(package, version) for version in versions]

    megatron, torch, te = ("megatron-core", MEGATRON), ("torch", TORCH), ("transformer-engine", TRANSFORMER_ENGINE)
    return [*plain(*megatron), *LIGHTNING, *NEMO, *plain(*torch), *plain(*te)]
