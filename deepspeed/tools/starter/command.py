"""`ds init`: reads or prompts for the arguments, chooses a config, writes the files, prints the launch command."""

from __future__ import annotations

import argparse
import inspect
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from deepspeed.base.exceptions import ExplainedError
from deepspeed.base.tool_arguments import exit_quietly
from deepspeed.planning.step_time.shapes import is_shape
from deepspeed.tools.starter import arguments, choices, files


class RefusedInit(ExplainedError, ValueError):
    """The arguments contradict each other, or a file exists."""


@exit_quietly("ds init")
def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = arguments.parse(argv)
    except EOFError:
        raise RefusedInit("no answer; nothing was written") from None
    _check(args)
    if args.goal == "serve":
        written, reasons = files.serving_files(args)
    else:
        decision = choices.decide(args)
        if files.own_module(args) is not None:
            _check_forward(args, decision.answer.request.module)
        written, reasons = files.files(args, decision), decision.reasons
    _write(args.folder, written, args.force)
    print(*reasons, sep="\n")
    print(f"\nwritten in {args.folder}: {', '.join(written)}")
    if "hostfile" in written:
        print("put the names of your nodes into hostfile")
    print(f"start it with:\n  cd {shlex.quote(str(args.folder))} && {files.launch_command(args)}")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.goal in ("finetune", "lora", "serve") and is_shape(args.model):
        raise RefusedInit(
            f"--model {args.model} has no weights to {args.goal}: pass a Hugging Face folder or name"
        )
    if args.goal == "lora" and ":" in args.model and not Path(args.model).exists():
        raise RefusedInit(f"--goal lora needs a Hugging Face folder or name, not --model {args.model}")
    if files.own_module(args) == "task":
        raise RefusedInit(f"--model {args.model}: a task.py is written, too: rename your module")


def _check_forward(args: argparse.Namespace, module: nn.Module) -> None:
    """Refuse a user's module that the written loop could not call."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(input_ids=None, labels=None)
    except TypeError:
        raise RefusedInit(
            f'--model {args.model}: the loop calls model(input_ids=..., labels=...) and reads ["loss"] of the result, '
            f"but {type(module).__name__}.forward takes {signature}: wrap it, as docs/choosing.md shows"
        ) from None


def _write(folder: Path, texts: Mapping[str, str], force: bool) -> None:
    """Write the files. RefusedInit: one exists and ``force`` is off, or the folder cannot be written."""
    there = [name for name in texts if (folder / name).exists()]
    if there and not force:
        raise RefusedInit(f"{folder} already has {', '.join(there)}: use --force to overwrite")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RefusedInit(f"{error.filename or folder}: {error.strerror or error}") from None


if __name__ == "__main__":
    raise SystemExit(main())
