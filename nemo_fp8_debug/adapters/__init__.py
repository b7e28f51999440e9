"""Adapters of frameworks other than Lightning. Each module turns a framework's events into calls of a `Monitor`. Internal.

Import them by their full names, so that nobody needs a framework that they do not use:

    from nemo_fp8_debug.adapters.transformers import FP8DebugTrainerCallback
    from nemo_fp8_debug.adapters.megatron import FP8DebugBridgeCallback, FP8DebugForwardStep
"""
