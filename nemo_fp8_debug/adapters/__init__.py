"""Hosts other than Lightning: each module turns the events of one host into calls of a `Monitor`. Internal.

None is imported before it is asked for, so that only those who use a host need it:

    from nemo_fp8_debug.adapters.transformers import FP8DebugTrainerCallback
    from nemo_fp8_debug.adapters.megatron import FP8DebugBridgeCallback, FP8DebugForwardStep
"""
