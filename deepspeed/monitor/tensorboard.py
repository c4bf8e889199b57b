"""Curves for TensorBoard, through ``torch.utils.tensorboard``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from deepspeed.monitor.base import Backend, Event, Point
from deepspeed.monitor.utils import check_tb_availability, run_folder


class TensorBoardMonitor(Backend):
    """Event files in ``output_path/job_name``."""

    key = "tensorboard"

    def __init__(self, tensorboard_config: object) -> None:
        self.summary_writer: Any = None
        self._flush = True
        super().__init__(tensorboard_config)

    @property
    def output_path(self) -> str | None:
        return self.monitor_config.output_path

    @property
    def job_name(self) -> str:
        return self.monitor_config.job_name

    def get_summary_writer(self, base: str | None = None) -> Any:
        """A new ``SummaryWriter`` for the folder of this run. ``base`` (default ``~/tensorboard``) replaces an
        empty ``output_path``."""
        check_tb_availability()
        from torch.utils.tensorboard import SummaryWriter

        base = base or os.path.join(os.path.expanduser("~"), "tensorboard")
        folder = run_folder(self.output_path, self.job_name, base)
        os.makedirs(folder, exist_ok=True)
        self.summary_writer = SummaryWriter(log_dir=folder)
        return self.summary_writer

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        """``flush=False`` lets the writer decide when the points reach the file."""
        self._flush = flush
        super().write_events(event_list)

    def flush(self) -> None:
        if self._may_write() and self.summary_writer is not None:
            self._try(self.summary_writer.flush)

    def _open(self) -> None:
        self.get_summary_writer()

    def _write(self, points: Iterable[Point]) -> None:
        writer = self.summary_writer or self.get_summary_writer()
        self.summary_writer = None  # a writer that has failed never writes again
        for name, value, samples in points:
            writer.add_scalar(name, value, samples)
        if self._flush:
            writer.flush()
        self.summary_writer = writer

    def _close(self) -> None:
        if self.summary_writer is not None:
            self.summary_writer.close()
