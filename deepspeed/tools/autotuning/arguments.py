"""Command lines: find a script's config among its arguments, and run the script with another config."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.config.analysis import analyse
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.reader import ConfigSource, read_config
from deepspeed.config.sections.autotuning import DeepSpeedAutotuningConfig
from deepspeed.tools.autotuning.utils import get_val_by_key
from deepspeed.tools.config.clients import read_any, read_client

CONFIG_ARGUMENTS = ("--deepspeed_config", "--deepspeed", "--deepspeed_config_file")
"""Arguments that take a config: this package's and the Trainer's in scripts, and that of `accelerate launch`."""
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
ACCELERATE_CONFIG = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
LAUNCHER = [sys.executable, "-m", "deepspeed.tools.launcher.runner"]
FLAGS = "module no_python no_local_rank bind_cores_to_rank quiet no_ssh_check force_multi save_pid".split()
VALUES = (
    "hostfile master_addr launcher launcher_args ssh_port venv_script enable_each_rank_log bind_core_list log_level"
).split()
"""Launcher options that experiments take over from the user's command."""


def given_config(arguments: Sequence[str]) -> dict[str, Any]:
    """Read the config that the script is given. ValueError: there is none, or it cannot be read."""
    found = (value_of(arguments, name) for name in CONFIG_ARGUMENTS)
    given = next((value for value in found if value), None) or os.environ.get(ACCELERATE_CONFIG)
    of_accelerate = value_of(arguments, "--config_file") if list(arguments[:1]) == ["launch"] else None
    if given is None and of_accelerate is not None:
        return read_config_of_accelerate(of_accelerate)
    if given is None:
        raise ValueError(
            "autotuning changes the script's config, but there is none among its arguments: pass "
            "--deepspeed_config FILE, or --deepspeed FILE to a script of the Trainer. A script that names "
            "the file in deepspeed.initialize(config=...) must take the name from such an argument"
        )
    return read_config(given).data


def section_of(config: Mapping[str, Any]) -> DeepSpeedAutotuningConfig:
    """Return the section `autotuning`. Raises DeepSpeedConfigError with all its errors."""
    given = {"autotuning": config.get("autotuning") or {}}
    found = analyse(ConfigSource(given), None)
    errors = [problem for problem in found.errors if problem.path[:1] == ("autotuning",)]
    if errors or found.config is None:
        raise DeepSpeedConfigError.of(errors)
    return found.config.autotuning


def read_config_of_accelerate(file: str) -> dict[str, Any]:
    """Return the DeepSpeed config that Accelerate builds from its own file. Raises ValueError."""
    client = read_client(read_any(file), 1)
    if client is None or client.errors:
        problem = "; ".join(map(str, client.errors)) if client is not None else "not an Accelerate config"
        raise ValueError(f"--config_file {file}: {problem}")
    return dict(client.source.data)


def value_of(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of an argument, ``--name value`` or ``--name=value``; None if it is missing or has no value."""
    for place, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
        if argument == name and place + 1 < len(arguments) and not arguments[place + 1].startswith("-"):
            return arguments[place + 1]
    return None


def with_value(arguments: Sequence[str], name: str, value: str) -> list[str]:
    """Return the arguments with one of them set to this value, appended if it is missing."""
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
    """Return the script's arguments with the config in ``file``, and with its values for the arguments in ``mappings``
    (key of the config -> argument)."""
    arguments = list(user_args)
    names = [name for name in CONFIG_ARGUMENTS if value_of(arguments, name) is not None]
    if not names and arguments[:1] == ["launch"] and value_of(arguments, "--config_file"):
        arguments[1:1] = ["--deepspeed_config_file", str(file)]
    for name in names:
        arguments = with_value(arguments, name, str(file))
    for key, name in mappings.items():
        value = get_val_by_key(config, key)
        if value is not None:
            arguments = with_value(arguments, name, str(value))
    return arguments


def start_command(args: Any, devices: str) -> list[str]:
    """Return the command that starts the script: the launcher, unless `accelerate launch` starts the ranks itself."""
    if is_accelerate(args):
        return list(ACCELERATE)
    return [*launcher_command(args, devices), args.user_script]


def is_accelerate(args: Any) -> bool:
    """Tell whether the script is `accelerate launch`, as in `deepspeed --autotuning tune accelerate launch
    train.py`."""
    return Path(args.user_script).name == "accelerate" and list(args.user_args[:1]) == ["launch"]


def launcher_command(args: Any, devices: str) -> list[str]:
    """Return the launcher command with the user's options, and ``devices`` in place of the device options."""
    command = list(LAUNCHER)
    command += [f"--{name}" for name in FLAGS if getattr(args, name, False)]
    values = [*VALUES, "master_port"] if getattr(args, "master_port_given", False) else VALUES
    command += [
        f"--{name}={getattr(args, name)}" for name in values if getattr(args, name, None) not in (None, "")
    ]
    return [*command, devices]
