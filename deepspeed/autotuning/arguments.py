"""Command lines: where a script's config is among its arguments, and how to run it with another."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.autotuning.utils import get_val_by_key
from deepspeed.config.reader import read_config

CONFIG_ARGUMENTS = ("--deepspeed_config", "--deepspeed")
"""Arguments of scripts that are followed by a config: ours, and that of the Trainer."""
ACCELERATE_CONFIG = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
LAUNCHER = [sys.executable, "-m", "deepspeed.launcher.runner"]
FLAGS = "module no_python no_local_rank bind_cores_to_rank quiet no_ssh_check force_multi save_pid".split()
VALUES = (
    "hostfile master_addr launcher launcher_args ssh_port venv_script enable_each_rank_log bind_core_list log_level"
).split()
"""Options of the launcher that the user's command and an experiment's have in common."""


def given_config(arguments: Sequence[str]) -> dict[str, Any]:
    """The config that the script is given. Raises ValueError: there is none, or it cannot be read."""
    found = (value_of(arguments, name) for name in CONFIG_ARGUMENTS)
    given = next((value for value in found if value), None) or os.environ.get(ACCELERATE_CONFIG)
    if given is None:
        raise ValueError(
            "autotuning changes the config that the script is given, and there is none among its arguments: pass "
            "--deepspeed_config FILE, or --deepspeed FILE to a script of the Trainer"
        )
    return read_config(given).data


def value_of(arguments: Sequence[str], name: str) -> str | None:
    """The value of an argument: ``--name value`` or ``--name=value``; None if it is not there or has none."""
    for place, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
        if argument == name and place + 1 < len(arguments) and not arguments[place + 1].startswith("-"):
            return arguments[place + 1]
    return None


def with_value(arguments: Sequence[str], name: str, value: str) -> list[str]:
    """The same arguments with this value of one of them, which is added at the end if it is not there."""
    changed = list(arguments)
    for place, argument in enumerate(changed):
        if argument.startswith(f"{name}="):
            changed[place] = f"{name}={value}"
            return changed
        if argument == name and place + 1 < len(changed):
            changed[place + 1] = value
            return changed
    return [*changed, name, value]


def arguments_for(
    user_args: Sequence[str], file: Path, config: Mapping[str, Any], mappings: Mapping[str, str]
) -> list[str]:
    """The script's arguments with another config, which is in ``file``, and with its values where ``mappings`` (key of
    the config -> argument) say that the script takes them."""
    arguments = list(user_args)
    for name in CONFIG_ARGUMENTS:
        if value_of(arguments, name) is not None:
            arguments = with_value(arguments, name, str(file))
    for key, name in mappings.items():
        value = get_val_by_key(config, key)
        if value is not None:
            arguments = with_value(arguments, name, str(value))
    return arguments


def launcher_command(args: Any, devices: str) -> list[str]:
    """The launcher with the options that the user gave it, and ``devices`` in place of those that choose devices."""
    command = list(LAUNCHER)
    command += [f"--{name}" for name in FLAGS if getattr(args, name, False)]
    values = [*VALUES, "master_port"] if getattr(args, "master_port_given", False) else VALUES
    command += [
        f"--{name}={getattr(args, name)}" for name in values if getattr(args, name, None) not in (None, "")
    ]
    return [*command, devices]
