"""Curves for Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from deepspeed.observe.monitor.base import MonitorBackend, Point, by_samples
from deepspeed.observe.monitor.utils import check_wandb_availability


class WandbMonitor(MonitorBackend):
    """A run of ``project``, with the samples processed so far as the step of each row.

    An active run of the same project, team and group is shared. Next to any other active run, a separate one is
    created: rows must be logged in order of step, and the script counts its own steps.
    """

    key = "wandb"

    def __init__(self, wandb_config: object) -> None:
        self.run: Any = None
        self._is_shared = False
        super().__init__(wandb_config)

    group = property(attrgetter("monitor_config.group"))
    team = property(attrgetter("monitor_config.team"))
    project = property(attrgetter("monitor_config.project"))

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """Call the run's ``log`` on rank 0."""
        if self._may_write():
            self._try(lambda: self.run.log(dict(data), step=step, commit=commit))

    def _open(self) -> None:
        wandb: Any = check_wandb_availability()
        active = wandb.run
        if active is not None and self._is_ours(active):
            self.run, self._is_shared = active, True
            return
        beside: dict[str, Any] = {"reinit": "create_new"} if active is not None else {}
        self.run = wandb.init(project=self.project, group=self.group, entity=self.team, **beside)

    def _is_ours(self, run: Any) -> bool:
        same_place = run.project == self.project and (run.group or None) == (self.group or None)
        return same_place and (not self.team or run.entity == self.team)

    def _write(self, points: Iterable[Point]) -> None:
        for samples, row in by_samples(points).items():  # one call per row, however many curves it has
            self.run.log(row, step=samples)

    def _write_config(self, config: Mapping[str, Any]) -> None:
        if self._is_shared:  # keep the script's own keys
            config = {"deepspeed": {**self.run.config.get("deepspeed", {}), **config}}
        self.run.config.update(dict(config), allow_val_change=True)

    def _write_artifact(self, path: str) -> None:
        self.run.save(path, policy="now")

    def _close(self) -> None:
        if not self._is_shared:  # the script, which began a shared run, may still log to it
            self.run.finish()
