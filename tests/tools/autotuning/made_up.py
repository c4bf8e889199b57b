"""An autotuner whose runs a function stands in for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deepspeed.tools.autotuning import Autotuner, scheduler

CONFIG = {"train_batch_size": 8}


def tuner(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: Any,
    config: Mapping[str, Any] = CONFIG,
    **section: Any,
) -> Autotuner:
    """``machine`` is called as ``run_experiment`` is; ``section``: keys of ``autotuning``."""
    monkeypatch.setattr(scheduler, "run_experiment", machine)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**config, "autotuning": {"enabled": True, **section}}))
    args = argparse.Namespace(
        user_script="train.py",
        user_args=["--deepspeed_config", str(file)],
        autotuning="tune",
        log_level="info",
    )
    return Autotuner(args, {"localhost": [0, 1]})
