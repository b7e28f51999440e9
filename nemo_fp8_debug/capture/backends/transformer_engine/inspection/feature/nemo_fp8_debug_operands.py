"""The feature that Transformer Engine calls; nvdlfw_inspect runs this file, nothing imports it."""

from __future__ import annotations

from typing import Any

from nvdlfw_inspect.registry import Registry, api_method
from transformer_engine.debug.features.api import TEConfigAPIMapper, TransformerEngineAPI

from nemo_fp8_debug.capture.backends.transformer_engine import inspection

# Importing Transformer Engine's API registers it the first time only, and the end of a session forgets it.
Registry.register_namespace_api(namespace="transformer_engine")(TransformerEngineAPI)


@Registry.register_feature(namespace="transformer_engine")
class NemoFP8DebugOperands(TEConfigAPIMapper):  # type: ignore[misc]
    """Hands operands of a sampled step to the monitor."""

    @api_method  # type: ignore[untyped-decorator]
    def inspect_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int]:
        """Whether the tensor is wanted, and the next iteration to ask at: that of all sampled steps."""
        return inspection.wants(layer_name, tensor_name), inspection.SAMPLED

    @api_method  # type: ignore[untyped-decorator]
    def inspect_tensor(
        self,
        config: dict[str, Any],
        layer_name: str,
        tensor_name: str,
        iteration: int,
        tp_group: Any,
        tensor: Any,
        rowwise_quantized_tensor: Any = None,
        columnwise_quantized_tensor: Any = None,
        quantizer: Any = None,
        tp_size: int = 1,
    ) -> None:
        """A tensor that has just been cast by `quantizer`; None: it is multiplied as it is."""
        inspection.hand_over(layer_name, tensor_name, tensor, quantizer)
