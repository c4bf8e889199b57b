"""`ds_check`: report on a config file, or correct it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from deepspeed.base.tool_arguments import ends_quietly
from deepspeed.config.reader import UnreadableConfig
from deepspeed.tools import parsers
from deepspeed.tools.config.check import check_config, check_source
from deepspeed.tools.config.clients import client_of, read_any
from deepspeed.tools.config.fix import CannotFix, corrected, start_text, unified, write_fixed
from deepspeed.tools.config.report import ConfigReport, Style, report_lines


def fix_file(path: str, world_size: int | None = None, *, output: str | None = None) -> ConfigReport:
    """Correct a config file where its meaning is clear, print the changes, and report what is left.

    Without `output` the file itself is overwritten, with a copy of the original next to it (`.bak`). Raises CannotFix.
    """
    if not os.path.isfile(path):
        raise CannotFix(f"{path[:200]} is not a file")
    try:
        source = read_any(path)
    except UnreadableConfig as error:
        raise CannotFix(f"{error}; fix this by hand") from None
    if client := client_of(source.data):
        raise CannotFix(f"{path} is a file of {client}: run this on the DeepSpeed config that it names")
    before = source.text or ""
    text, report = corrected(
        start_text(source, in_place=output is None), path, lambda attempt: check_source(attempt, world_size)
    )
    print("\n".join(unified(before, text, path)) or "nothing to correct")
    if text != before or output is not None:
        write_fixed(path, text, output)
    return report


@ends_quietly("ds_check --fix")
def main(argv: Sequence[str] | None = None) -> int:
    parser = parsers.check()
    args = parser.parse_args(argv)
    if args.output is not None and not args.fix:
        parser.error("--output goes with --fix")
    report = check_config(args.config, args.gpus)
    if args.fix:
        report = fix_file(args.config, args.gpus, output=args.output)
    colors = sys.stdout.isatty() and not args.no_color and "NO_COLOR" not in os.environ
    print("\n".join(report_lines(report, Style(colors))))
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
