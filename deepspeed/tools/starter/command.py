"""`ds init`: reads or prompts for the arguments, chooses a config, writes the files, prints the launch command."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

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


def _write(folder: Path, texts: Mapping[str, str], force: bool) -> None:
    """Write all files or none."""
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
