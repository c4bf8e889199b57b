"""After an error about dtypes in a 16-bit model: that its buffers have kept theirs, and the key that casts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from deepspeed.base.logging import logger

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine

SIGNS = ("same dtype", "expected scalar type", "should be the same", "same data type")
"""Parts of torch's messages when the operands of an operation differ in dtype."""
SHOWN = 3


class BufferDtypeAdvice:
    """Logs the remedy where it may be one, once per engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.given = False
        engine.events.on("on_error", self.look)

    def look(self, *, error: BaseException | None) -> None:
        if self.given or not isinstance(error, RuntimeError) or not any(sign in str(error) for sign in SIGNS):
            return
        precision = self.engine.plan.precision
        if precision.param is None or precision.param.itemsize >= 4 or precision.buffer is not None:
            return
        names = list(wide_buffers(self.engine.module))
        if not names:
            return
        self.given = True
        name = "bf16" if self.engine._config.bfloat16_config.enabled else "fp16"
        more = ", ..." if len(names) > SHOWN else ""
        logger.error(
            f"the weights of this model are in {name}, but buffers keep the dtype that they have, as in release 0.19: "
            f"{', '.join(names[:SHOWN])}{more}. If the operation that failed uses one of them, set "
            f'"data_types": {{"buffer_dtype": "{name}"}} in the config, as earlier releases cast them, or cast the '
            "buffer where the model uses it."
        )


def wide_buffers(module: nn.Module) -> Iterator[str]:
    """Names of floating buffers of more than 16 bits, except the running statistics of norms."""
    for name, buffer in module.named_buffers():
        if not buffer.is_floating_point() or buffer.itemsize < 4:
            continue
        if not name.endswith(("running_mean", "running_var")):
            yield name
