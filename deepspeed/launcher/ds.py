"""The `ds` command: `ds plan ...` and its siblings; anything else is what `deepspeed` takes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from deepspeed.launcher import runner

USAGE = """\
usage: ds plan CONFIG --model MODEL --gpus N   memory per rank, before anything is allocated (ds plan --help)
       ds ...                                  the same as `deepspeed ...`:
"""


def main(argv: Sequence[str] | None = None) -> int | None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["plan"]:
        from deepspeed.memory_plan import command  # brings torch, which the launcher does without

        return command.main(arguments[1:])
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
    runner.main(argv)
    return None


if __name__ == "__main__":
    raise SystemExit(main())
