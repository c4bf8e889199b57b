"""Lion."""

from deepspeed.ops.lion.fused_lion import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
