"""DualPipeV under its documented names: a V-shaped pipeline, with the loss on the first stage.

DeepSeek-AI: DeepSeek-V3 Technical Report, 2024, and its V-shaped variant. The engine follows the order
"zero-bubble-v" (`parallel/pipeline/schedules/orders.py`), which also defers weight gradients.
"""

from __future__ import annotations

from typing import Any

from deepspeed.engine.pipeline.engine import PipelineEngine
from deepspeed.parallel.pipeline.module import PipelineModule
from deepspeed.parallel.pipeline.schedules.instructions import check_dual_pipe
from deepspeed.parallel.pipeline.schedules.orders import Order


class DualPipeVModule(PipelineModule):
    """A ``PipelineModule`` with ``chunks=2`` and ``zigzag=True``: of ``2 num_stages`` chunks of layers, pipeline rank
    ``r`` has the ``r``-th from the start and the ``r``-th from the end. Other arguments are those of that class.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, chunks=2, zigzag=True, **kwargs)


class DualPipeVEngine(PipelineEngine):
    """The engine of a ``DualPipeVModule``. ValueError: a training or evaluation batch has fewer than two
    micro-batches per stage."""

    def _schedule(self, asked: str) -> str:
        return "zero-bubble-v" if asked == "1f1b" else asked  # 1f1b is the default of other modules

    def _order(self, micro_batches: int) -> Order:
        check_dual_pipe(self.num_stages, micro_batches)
        return super()._order(micro_batches)

    def _evaluate(self, count: int) -> list[Any]:
        check_dual_pipe(self.num_stages, count)
        return super()._evaluate(count)
