"""Curves for TensorBoard, through ``torch.utils.tensorboard``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.base.python_gc import call_when_dropped
from deepspeed.observe.monitor.base import Event, FolderBackend, Point
from deepspeed.observe.monitor.utils import check_tb_availability


class TensorBoardMonitor(FolderBackend):
    """Event files in ``output_path/job_name``."""

    key = "tensorboard"

    def __init__(self, tensorboard_config: object) -> None:
        self.summary_writer: Any = None
        self._flush = True
        super().__init__(tensorboard_config)

    def get_summary_writer(self, base: str | None = None) -> Any:
        """Create a ``SummaryWriter`` for the folder of this run. ``base`` (default ``~/tensorboard``) replaces an
        empty ``output_path``."""
        check_tb_availability()
        from torch.utils.tensorboard import SummaryWriter

        self.summary_writer = SummaryWriter(log_dir=self.make_folder(base))
        call_when_dropped(self, _end, self.summary_writer)  # its thread would outlive this object
        return self.summary_writer

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        """Write the events. With ``flush=False``, the writer decides when they reach the file."""
        self._flush = flush
        super().write_events(event_list)

    def flush(self) -> None:
        if self._may_write() and self.summary_writer is not None:
            self._try(self.summary_writer.flush)

    def _open(self) -> None:
        self.get_summary_writer()

    def _write(self, points: Iterable[Point]) -> None:
        writer = self.summary_writer or self.get_summary_writer()
        self.summary_writer = None  # a writer is not reused after a failure
        for name, value, samples in points:
            writer.add_scalar(name, value, samples)
        if self._flush:
            writer.flush()
        self.summary_writer = writer

    def _write_config(self, config: Mapping[str, Any]) -> None:
        """Write the config as text, indented by four blanks: a Markdown code block."""
        lines = json.dumps(config, indent=2, default=str).splitlines()
        writer = self.summary_writer or self.get_summary_writer()
        writer.add_text("config", "\n".join(f"    {line}" for line in lines))

    def _close(self) -> None:
        if self.summary_writer is not None:
            self.summary_writer.close()


def _end(writer: Any) -> None:
    with contextlib.suppress(Exception):  # the monitor is gone: there is no one to report an error to
        writer.close()
