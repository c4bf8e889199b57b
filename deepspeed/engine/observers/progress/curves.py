"""The engine's own curves, written to the monitors at each optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed.base.memory import GIB
from deepspeed.engine.observers.progress.readings import Reading, StepReader, memory_of
from deepspeed.observe import timer
from deepspeed.observe.monitor.monitor import Event, MonitorMaster

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine
    from deepspeed.engine.observers.progress.wall_clock import WallClockBreakdown

TIMERS = {
    timer.FORWARD_GLOBAL_TIMER: "elapsed_time_ms_forward",
    timer.BACKWARD_GLOBAL_TIMER: "elapsed_time_ms_backward",
    timer.BACKWARD_INNER_GLOBAL_TIMER: "elapsed_time_ms_backward_inner",
    timer.BACKWARD_REDUCE_GLOBAL_TIMER: "elapsed_time_ms_backward_allreduce",
    timer.STEP_GLOBAL_TIMER: "elapsed_time_ms_step",
    timer.EXPOSED_COMMUNICATION_TIMER: "elapsed_time_ms_exposed_communication",
    timer.DATA_TIMER: "elapsed_time_ms_data",
}
NUMBERS = {
    "train_loss": "loss",
    "lr": "rate",
    "grad_norm": "norm",
    "samples_per_second": "samples_per_s",
    "tokens_per_second": "tokens_per_s",
    "loss_scale": "scale",
}
"""Names of curves -> fields of a ``Reading``."""

MEMORY = "memory_gib"


class Curves:
    """Writes the readings of every optimizer step to the monitors, on rank 0.

    ``clock``: the wall-clock breakdown, None if disabled.
    """

    def __init__(
        self, engine: Engine, monitor: MonitorMaster, reader: StepReader, clock: WallClockBreakdown | None
    ) -> None:
        self.engine, self.monitor, self.reader, self.clock = engine, monitor, reader, clock
        # The live page has its own other numbers, and measures memory less often.
        self.numbers = NUMBERS if monitor.backends else {"loss_scale": NUMBERS["loss_scale"]}
        engine.events.on("after_update", self.write)

    def write(self, **_: Any) -> None:
        reading = self.reader.latest
        assert reading is not None
        if reading.loss is not None:
            self.engine.losses = reading.loss
        self.monitor.write_events(self.events(reading))

    def events(self, reading: Reading) -> list[Event]:
        values = {
            name: value for name, of in self.numbers.items() if (value := getattr(reading, of)) is not None
        }
        if self.numbers is NUMBERS:
            values[MEMORY] = memory_of(self.engine.device) / GIB
        if self.clock is not None:
            values |= {TIMERS[name]: ms for name, ms in self.clock.elapsed_ms.items()}
            for rank, times in self.clock.take_ranks():
                values |= {f"rank{rank}/{TIMERS[name]}": ms for name, ms in times.items()}
        return self.engine.curve_axis.events(values)
