"""The double of ``fla_npu.ops``."""
