"""Keys of accounts are neither logged nor saved."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any
from unittest import mock

from deepspeed.base.logging import logger
from deepspeed.config.deepspeed_config import DeepSpeedConfig
from deepspeed.config.redaction import HIDDEN, without_secrets
from deepspeed.config.sections.monitor import get_monitor_config
from deepspeed.engine.observers import attach
from deepspeed.observe.monitor.monitor import MonitorMaster
from tests.checkpoint.models import config, make_engine
from tests.pool import distributed

SECRET = "k3y-of-an-account"
COMET = {"comet": {"enabled": False, "api_key": SECRET}}


def test_only_secrets_are_replaced() -> None:
    given = {
        "a": {"api_key": SECRET, "WANDB_API_KEY": SECRET, "tokens": 3, "eos_token": "x"},
        "b": [1, (2, "c")],
    }
    assert without_secrets(given) == {
        **given,
        "a": {**given["a"], "api_key": HIDDEN, "WANDB_API_KEY": HIDDEN},
    }
    assert given["a"]["api_key"] == SECRET
    assert without_secrets({"api_key": None}) == {"api_key": None}


def test_trackers_get_neither_keys_nor_accounts_in_urls() -> None:
    seen: list[Any] = []
    master = MonitorMaster(get_monitor_config({}))
    master.backends.append(types.SimpleNamespace(write_config=seen.append))  # type: ignore[arg-type]
    hidden = [
        "token",
        "hf_token",
        "HF_TOKEN",
        "access_key",
        "aws_secret_access_key",
        "client_secret",
        "db_password",
    ]
    shown = {"pad_token": "<pad>", "eos_token": "</s>", "token": "", "token_budget": "64", "tokens": "3"}
    urls = {
        "https://me:pass@mlflow:5000/x": "https://mlflow:5000/x",
        "https://ghp_123@host/x@y": "https://host/x@y",
        "postgresql+psycopg2://me:p@ss@db/runs": "postgresql+psycopg2://db/runs",
        "abfss://container@account.dfs.core.windows.net/x": "abfss://container@account.dfs.core.windows.net/x",
        "s3://bucket/run:1@2": "s3://bucket/run:1@2",
        "me@host": "me@host",
    }
    section = dict.fromkeys(hidden, SECRET)
    master.write_config({"section": section, "shown": shown, "urls": list(urls)})
    assert seen == [
        {"section": dict.fromkeys(hidden, HIDDEN), "shown": shown, "urls": list(urls.values())},
    ]


def test_a_config_that_is_printed() -> None:
    lines: list[str] = []
    with mock.patch.object(logger, "info", lines.append):
        DeepSpeedConfig({"train_batch_size": 1, **COMET}).print("config")
    assert any("comet" in line for line in lines)
    assert SECRET not in "\n".join(lines)


@distributed(world_size=1)
def test_checkpoints_and_the_dumped_config(tmp_path: Path) -> None:
    dumped: list[object] = []
    with mock.patch.object(attach, "print_json_dist", lambda found, ranks: dumped.append(found)):
        engine = make_engine(config(2, dump_state=True, **COMET))
    assert HIDDEN in repr(dumped) and SECRET not in repr(dumped)
    engine.save_checkpoint(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 2 and not any(SECRET.encode() in path.read_bytes() for path in files)
    engine.destroy()
