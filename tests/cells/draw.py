"""Draws cells: each pair of features that a config can express in turn, and the rest of the cell at random."""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.cells.cell import CHOICES, FAMILIES, SENDING_SIGNS, Cell, why_not

FOUR_RANKS = 1 / 3
"""The share of cells with four ranks, among pairs that do not decide it."""
FILLED = 0.35
"""How likely another feature is not plain."""
SELDOM = {"compile": 0.1}
"""Of features that take long: times how likely the others are."""
COMPILED = {"no": 1, "inductor": 12}
"""Times as long as a cell that compiles nothing; with other backends 5."""
ASKED = (*FAMILIES, "inductor")
"""What a cell has only if it is asked for: it takes as long as ten others."""
_TRIES = 400
CANDIDATES = 6
"""Cells that are thought of for each one that is drawn."""
EACH_FAMILY = 10
"""One in this many cells is of a Transformers family."""
OWN = ("recompute", "compression", "attention", "parameters", "fp8", "layer_drop", "order")
"""What models of Transformers leave to others."""

Feature = tuple[str, Any]


def features() -> list[Feature]:
    """Every feature: a field with a value that is not plain."""
    return [
        (name, value) for name, values in CHOICES.items() for value in values[1:] if value not in FAMILIES
    ]


@functools.cache
def pairs() -> tuple[tuple[Feature, Feature], ...]:
    """All pairs of features that some cell has."""
    source = random.Random(0)
    return tuple(
        (first, second)
        for first, second in itertools.combinations(features(), 2)
        if first[0] != second[0] and completed(dict((first, second)), source) is not None
    )


def completed(given: Mapping[str, Any], source: random.Random) -> Cell | None:
    """A cell with these features and others at random; None if there is none."""
    for attempt in range(_TRIES):
        chosen = dict(given) | _implied(given, source)
        # The more attempts fail, the plainer the cell.
        share = FILLED * (1 - attempt / _TRIES)
        chosen.setdefault("ranks", _ranks(source))
        for name, values in CHOICES.items():
            if name not in chosen and source.random() < share * SELDOM.get(name, 1.0):
                chosen[name] = source.choice([value for value in values if value not in ASKED])
        if chosen.get("model") in FAMILIES:  # most features are those of our own models
            chosen |= {
                name: values[0] for name, values in CHOICES.items() if name in OWN and name not in given
            }
            chosen["axes"] = source.choice(["dp", "dp", "tp"]) if chosen["ranks"] > 1 else "dp"
        cell = Cell(**chosen)
        if not why_not(cell) and (attempt > _TRIES // 2 or not known_refusal(cell)):
            return cell
    return None


def known_refusal(cell: Cell) -> bool:
    """Return whether the cell is refused on principle: drawn only if the requested pair itself implies it."""
    elementwise = ("AdamW", "Adam", "SGD", "Adagrad", "Lion")
    if cell.optimizer == "DiLoCo" and cell.copies_of_one_batch:
        return True
    return (cell.tier == "zenflow" and cell.optimizer not in elementwise) or (
        cell.keeps_gradients and (cell.stage == 3 or cell.stage > 0 and cell.shards != "mics")
    )


def _implied(given: Mapping[str, Any], source: random.Random) -> dict[str, Any]:
    """Return the features that these features require."""
    axes, needed = str(given.get("axes", "")), dict[str, Any]()
    if "+" in axes or given.get("shards", "all") != "all":
        needed["ranks"] = 4
    if "ep" in axes.split("+"):
        needed["model"] = "moe"
    if given.get("order") == "interleaved":
        needed["accumulation"] = 2
    if "order" in given:
        needed["axes"] = source.choice(
            [each for each in CHOICES["axes"] if "pp" in each and "ep" not in each]
        )
    if given.get("resume") == "2x2, 1":
        needed |= {"ranks": 4, "axes": "dp"}
    if given.get("recompute") == "partitioned":
        needed["axes"] = source.choice(["tp", "tp+sp"])
    if (
        given.get("tier") in ("nvme+params", "ratio")
        or given.get("wire") == "qwz"
        or given.get("shards") == "hpz"
    ):
        needed["stage"] = 3
    elif (
        given.get("tier", "device") != "device" or given.get("wire") == "qgz" or given.get("shards") == "mics"
    ):
        needed["stage"] = source.choice([1, 2, 3])
    own = given.get("optimizer") in (*SENDING_SIGNS, "DiLoCo")
    if own and "stage" not in given and needed.get("stage", 1):
        needed["stage"] = source.choice(
            [1, 2] if "stage" in needed or given.get("resume") == "stage" else [0, 1, 2]
        )
    if own and needed.get("stage", given.get("stage")) in (1, 2):
        needed |= {"shards": "mics", "ranks": 4}
    if needed.get("axes", "dp") != "dp":
        needed["ranks"] = 4
    return {name: value for name, value in needed.items() if name not in given}


def _ranks(source: random.Random) -> int:
    drawn = source.random()
    return 4 if drawn < FOUR_RANKS else 2 if drawn < 0.85 else 1


def cells(seed: int, *, families: bool = False, before: Iterable[Cell] = ()) -> Iterator[Cell]:
    """Cells without end; the same ones for the same seed. Each has the pair that was drawn least so far, ``before``
    included, and of some such cells it is the one with the most pairs that were drawn seldom. With ``families`` each
    tenth one is a model of Transformers."""
    source, others = random.Random(seed), of_families(seed)
    order = source.sample(pairs(), len(pairs()))
    counts = dict.fromkeys(order, 0)
    for pair in itertools.chain.from_iterable(map(pairs_of, before)):
        if pair in counts:
            counts[pair] += 1
    while True:
        for _ in range(EACH_FAMILY - 1 if families else 1):
            pair = min(order, key=counts.__getitem__)
            counts[pair] += 1  # whether or not it has a cell this time
            found = [completed(dict(pair), source) for _ in range(CANDIDATES)]
            cell = max(filter(None, found), key=lambda each: worth(each, counts), default=None)
            if cell is not None:
                counts |= {
                    each: counts[each] + 1 for each in pairs_of(cell) if each in counts and each != pair
                }
                yield cell
        if families:
            yield next(others)


def pairs_of(cell: Cell) -> Iterator[tuple[Feature, Feature]]:
    """Every two of its features, in the order of the fields."""
    return itertools.combinations(cell.features().items(), 2)


def worth(cell: Cell, counts: Mapping[tuple[Feature, Feature], int]) -> float:
    """Return the gain of a cell for pairs drawn as often as in ``counts``, relative to its time."""
    added = sum(4.0 ** -counts[pair] for pair in pairs_of(cell) if pair in counts)
    return added / (cell.ranks * COMPILED.get(cell.compile, 5)) ** 0.5


def of_families(seed: int) -> Iterator[Cell]:
    """Cells of models of Transformers without end: every family has its turn before one has its second."""
    source = random.Random(seed)
    while True:
        for family in source.sample(FAMILIES, len(FAMILIES)):
            cell = completed({"model": family}, source)
            if cell is not None:
                yield cell


def coverage(drawn: Iterable[Cell]) -> collections.Counter[tuple[str, str]]:
    """Return the number of cells with each pair of features, written as in the cells' lines."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for cell in drawn:
        counts.update(cell.pairs())
    return counts
