"""Bytes sent within and across hosts per optimizer step: for ``wall_clock_breakdown``, the monitors and the
communication log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed.base.logging import is_rank_zero, log_dist
from deepspeed.comm.links import BytesSent
from deepspeed.comm.record import convert_size
from deepspeed.observe.monitor.monitor import MonitorMaster

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine


class LinkTotals:
    """Total bytes sent in ``steps`` steps. The log keeps it after the engine is destroyed."""

    def __init__(self) -> None:
        self.sent, self.steps = BytesSent(), 0

    def summary(self) -> dict[str, float]:
        steps = max(1, self.steps)
        return {
            "steps": self.steps,
            "bytes_within_host": self.sent.within,
            "bytes_across_hosts": self.sent.across,
            "bytes_within_host_per_step": self.sent.within / steps,
            "bytes_across_hosts_per_step": self.sent.across / steps,
        }


class BytesByLink:
    """Counts the bytes sent by this rank: ``last`` is the last step's, measured from the end of the previous one.

    ``speaks``: log a line per step on rank 0. ``monitor``: write two curves of rank 0.
    """

    def __init__(self, engine: Engine, *, speaks: bool, monitor: MonitorMaster | None) -> None:
        self.engine, self.speaks = engine, speaks
        self.monitor = monitor if is_rank_zero() else None
        self.before = engine._network.sent_by_link()
        self.last, self.totals = BytesSent(), LinkTotals()
        engine.events.on("after_update", self.count)
        if engine._network.log.enabled:
            engine._network.log.links = self.totals.summary

    def count(self, **_: Any) -> None:
        engine = self.engine
        now = engine._network.sent_by_link()
        self.last, self.before = now - self.before, now
        self.totals.sent += self.last
        self.totals.steps += 1
        if self.speaks:
            log_dist(
                f"sent by this rank in step {engine.global_steps}: {convert_size(self.last.within)} within its host, "
                f"{convert_size(self.last.across)} across hosts",
                ranks=[0],
            )
        if self.monitor is not None:
            sent = {
                "bytes_sent_within_host": float(self.last.within),
                "bytes_sent_across_hosts": float(self.last.across),
            }
            self.monitor.write_events(engine.curve_axis.events(sent))
