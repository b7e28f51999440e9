"""What a record says of the setup of a run, where a library does not tell."""

from __future__ import annotations

import pytest
import torch

from nemo_fp8_debug.monitor.fingerprint import _cudnn


def test_a_cudnn_that_torch_refuses_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on an H200, where an older one had been loaded before torch looked for its own."""

    def refuse() -> int:
        raise RuntimeError("cuDNN version incompatibility: PyTorch was compiled against (9, 19, 0). One option is another")

    assert _cudnn() == torch.backends.cudnn.version()
    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    assert _cudnn() == "unknown: cuDNN version incompatibility: PyTorch was compiled against (9, 19, 0)"
