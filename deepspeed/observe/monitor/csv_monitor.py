"""Curves as CSV files."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.observe.monitor.base import FolderBackend, Point


class csvMonitor(FolderBackend):
    """One file per curve: ``output_path/job_name/Train_Samples_lr.csv`` with the columns ``step`` (samples) and ``lr``.

    An existing file is appended to, so that a resumed run has one curve.
    """

    key = "csv_monitor"

    def __init__(self, csv_config: object) -> None:
        self.log_dir: str | None = None
        self.filenames: list[str] = []
        """File names of the curves written so far, without folder and ".csv"."""
        super().__init__(csv_config)

    def setup_log_dir(self, base: str | None = None) -> str:
        """Create the folder of this run and return it. ``base`` (default ``~/csv_monitor``) replaces an empty
        ``output_path``."""
        self.log_dir = self.make_folder(base)
        return self.log_dir

    def _open(self) -> None:
        self.setup_log_dir()

    def _write(self, points: Iterable[Point]) -> None:
        curves: dict[str, list[tuple[int, float]]] = {}
        for name, value, samples in points:
            curves.setdefault(name, []).append((samples, value))
        for name, rows in curves.items():
            if (file_name := name.translate(_UNDERSCORES)) not in self.filenames:
                self.filenames.append(file_name)
            with open(self.path_of(name), "a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if file.tell() == 0:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerows(rows)

    def _write_config(self, config: Mapping[str, Any]) -> None:
        """Write the config as ``config.json`` next to the curves."""
        assert self.log_dir is not None
        with open(os.path.join(self.log_dir, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file, indent=2, default=str)

    def path_of(self, name: str) -> str:
        """Return the file of a curve: slashes, blanks and NULs of its name become underscores."""
        assert self.log_dir is not None
        return os.path.join(self.log_dir, name.translate(_UNDERSCORES) + ".csv")


_UNDERSCORES = str.maketrans(dict.fromkeys("/\\ \0", "_"))
