"""Curves for Aim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.observe.monitor.base import MonitorBackend, Point, flat
from deepspeed.observe.monitor.utils import check_aim_availability


class AimMonitor(MonitorBackend):
    """A run of ``experiment`` in the repository ``repo``."""

    key = "aim"
    run: Any = None

    def _open(self) -> None:
        aim: Any = check_aim_availability()
        section = self.monitor_config
        # Record curves only: no system metrics, no terminal output.
        self.run = aim.Run(
            repo=section.repo,
            experiment=section.experiment,
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )

    def _write(self, points: Iterable[Point]) -> None:
        for name, value, samples in points:
            self.run.track(value, name=name, step=samples)

    def _write_config(self, config: Mapping[str, Any]) -> None:
        self.run["hparams"] = flat(config)

    def _close(self) -> None:
        self.run.close()
