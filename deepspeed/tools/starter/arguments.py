"""Arguments of `ds init`, and the prompts for missing ones in a terminal. Imports no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from deepspeed.base.tool_arguments import ArgumentParser, add_options, positive, takes
from deepspeed.tools import parsers

GOALS = ("finetune", "pretrain", "lora", "serve")
CLIENTS = ("torch", "transformers", "accelerate", "lightning")

_EPILOG = """\
In a terminal, missing values are prompted for; without one they are required. Nothing is allocated: the
memory of each choice is planned, as `ds plan` does, and the first that fits is written, the cheapest in time first.

examples:
  ds init out/tuned --model ./Llama-3.1-8B --goal finetune --gpus 2 --device-memory 24G --host-memory 256G
  ds init out/adapted --model ./Llama-3.1-8B --goal lora --with transformers --device-memory 24G
  ds init out/new --model gpt:125m --goal pretrain --gpus 8 --nodes 2 --device-memory 80G --link-mbits 10000
  ds init out/served --model ./Llama-3.1-8B --goal serve --gpus 2 --device-memory 24G
"""


def parser() -> argparse.ArgumentParser:
    made = ArgumentParser(
        prog="ds init",
        description="Write ds_config.json, a training script and a launch command for a model, a goal and "
        "your\nmachines, and explain the choices in CHOICES.md.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options = {
        "folder": takes("folder to write into (default: this one)", Path(), type=Path, nargs="?"),
        "--model": takes(
            "Hugging Face folder or name, module:function, or a size such as gpt:125m (see `ds plan --help`)"
        ),
        "--goal": takes("what to do with the model", choices=GOALS),
        "--with": takes("what drives the training loop (default: torch)", dest="client", choices=CLIENTS),
        "--gpus N": takes("devices per node (default: 1)", type=positive),
        "--nodes M": takes("number of nodes (default: 1)", 1, type=positive),
        **parsers.MACHINE,
        "--nvme FOLDER": takes("local storage for offloaded model states"),
        "--link-mbits RATE": takes(
            "Mbit/s between nodes: also report what would reduce communication", type=parsers.positive_number
        ),
        "--sequence S": takes("tokens per sample (default: %(default)s)", 1024, type=positive),
        "--batch B": takes("samples per step over all ranks (default: 32, or one per rank)", type=positive),
        "--force": "overwrite existing files",
    }
    return add_options(made, options)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; prompt for missing ones in a terminal, else exit with code 2 (SystemExit)."""
    made = parser()
    args = made.parse_args(argv)
    interactive = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
    missing = [name for name in ("model", "goal") if getattr(args, name) is None]
    if missing and not interactive:
        made.error(f"give {' and '.join(f'--{name}' for name in missing)} (no terminal to ask in)")
    if missing:
        _ask_all(made, args)
    args.client = args.client or "torch"
    args.gpus = args.gpus or 1
    return args


def _ask_all(made: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Prompt for the options that were not given; answers are parsed like option values."""
    questions: list[tuple[str, str, str]] = [
        ("--model", "Model: a folder or name of Hugging Face, or a size such as gpt:125m", ""),
        ("--goal", f"Goal: {', '.join(GOALS)}", "finetune"),
        ("--with", f"Training loop of: {', '.join(CLIENTS)}", "torch"),
        ("--gpus", "Devices per node", "1"),
        ("--device-memory", "Memory of each device, such as 24G (empty: of this machine's)", ""),
    ]
    for option, question, default in questions:
        action = next(each for each in made._actions if option in each.option_strings)
        if getattr(args, action.dest) is None:
            setattr(args, action.dest, _ask(action, question, default))


def _ask(action: argparse.Action, question: str, default: str) -> object:
    read: Callable[[str], object] = action.type if callable(action.type) else str
    while True:
        text = input(f"{question}{f' [{default}]' if default else ''}: ").strip() or default
        if not text and action.dest != "model":
            return None
        try:
            if not text or (action.choices is not None and text not in action.choices):
                raise ValueError(
                    f"one of {', '.join(action.choices)}" if action.choices else "a value is needed"
                )
            return read(text)
        except (ValueError, argparse.ArgumentTypeError) as error:
            print(f"  {error}")
