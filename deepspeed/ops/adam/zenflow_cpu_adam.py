"""``ZenFlowCPUAdam``: the host's Adam under the name that ZenFlow's documentation gives it."""

from __future__ import annotations

from typing import Any

from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam


class ZenFlowCPUAdam(DeepSpeedCPUAdam):
    """``DeepSpeedCPUAdam``. ``overlap_step`` is kept to be read: whether the host works beside the device is decided by
    ``zero_optimization.zenflow.overlap_step``."""

    def __init__(self, *args: Any, overlap_step: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.overlap_step = overlap_step
