"""What the command-line tools share. Nothing here imports torch: `deepspeed` itself does without it."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import NoReturn

_UNKNOWN = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, but an unknown option is answered with similar ones."""

    def error(self, message: str) -> NoReturn:
        unknown = _UNKNOWN.match(message)
        options = [word.partition("=")[0] for word in unknown[1].split()] if unknown else []
        near = [text for option in options if option.startswith("-") and (text := self._suggestion(option))]
        super().error("; ".join([message, *near]))

    def _suggestion(self, option: str) -> str:
        found = difflib.get_close_matches(option, self._option_string_actions, n=2, cutoff=0.6)
        return f"did you mean {' or '.join(found)} in place of {option}?" if found else ""


def positive(text: str) -> int:
    """The type of an option that is a count."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)
