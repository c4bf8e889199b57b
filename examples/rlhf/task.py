"""A toy task whose answers a program can score: short questions, polite and rude answers, right and wrong ones.

``score`` looks at three things: the answer is a sentence of the grammar about the thing that was asked for, it begins
politely, and it ends politely. Demonstrations do each of them half of the time or a little more often.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

THINGS = "cat dog key book hat cup ball map".split()
PLACES = ["on the table", "under the bed", "in the box", "near the door"]
OPENERS = {"certainly": True, "gladly": True, "well": False, "hm": False}
CLOSERS = {"anytime": True, "cheers": True, "whatever": False, "duh": False}
_ANSWER = re.compile(
    rf"({'|'.join(OPENERS)}) the ({'|'.join(THINGS)}) is ({'|'.join(PLACES)}) ({'|'.join(CLOSERS)})"
)
WORDS = sorted(
    {"Human:", "Assistant:", "where", "the", "is", "?", *OPENERS, *CLOSERS, *THINGS}
    | {word for place in PLACES for word in place.split()}
)


def prompt(thing: str) -> str:
    return f"Human: where is the {thing} ? Assistant:"


def score(question: str, answer: str) -> float:
    """Between 0 and 1."""
    found = _ANSWER.fullmatch(answer.strip())
    if found is None:
        return 0.0
    opener, thing, _, closer = found.groups()
    return (OPENERS[opener] + (f"the {thing} ?" in question) + CLOSERS[closer]) / 3


def _answer(draw: random.Random, thing: str) -> str:
    named = thing if draw.random() < 0.75 else draw.choice(THINGS)
    return f"{draw.choice(list(OPENERS))} the {named} is {draw.choice(PLACES)} {draw.choice(list(CLOSERS))}"


def rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """``prompt``, ``demonstration``, and ``chosen`` with a higher score than ``rejected``."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        question = prompt(thing := draw.choice(THINGS))
        pair = sorted((_answer(draw, thing) for _ in range(2)), key=lambda text: score(question, text))
        if score(question, pair[0]) < score(question, pair[1]):
            texts = {"demonstration": _answer(draw, thing), "chosen": pair[1], "rejected": pair[0]}
            found.append({"prompt": question, **texts})
    return found


def read(path: Path | None, count: int, seed: int) -> list[dict[str, str]]:
    """The rows of a file with a JSON object in each line, or of this task. What is chosen also demonstrates, if nothing
    else does."""
    if path is None:
        return rows(count, seed)
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def samples(path: Path) -> list[dict[str, str]]:
    """A text file, of which each line is learned as it is."""
    return [{"prompt": "", "chosen": line.strip()} for line in path.read_text().splitlines() if line.strip()]
