"""Expressions against plain torch, and the way through a file and several transforms."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deepspeed.checkpoint.originals import (
    Expression,
    Joined,
    LowRank,
    Originals,
    Part,
    Transposed,
    Weight,
)

WEIGHTS = {
    "a": torch.arange(12.0).view(4, 3),
    "b": torch.arange(6.0).view(2, 3),
    "left": torch.randn(4, 2),
    "right": torch.randn(2, 3),
    "low": torch.ones(4, 3, dtype=torch.bfloat16),
}
A, B = Weight("a"), Weight("b")
CASES: dict[str, tuple[Expression, Tensor]] = {
    "weight": (A, WEIGHTS["a"]),
    "part": (Part(A, 0, 1, 3), WEIGHTS["a"][1:3]),
    "joined": (Joined((A, B)), torch.cat([WEIGHTS["a"], WEIGHTS["b"]])),
    "joined parts": (
        Joined((Part(A, 1, 2, 3), Part(A, 1, 0, 2)), dim=1),
        WEIGHTS["a"][:, [2, 0, 1]],
    ),
    "transposed": (Transposed(A), WEIGHTS["a"].t()),
    "low rank": (
        LowRank(A, Weight("left"), Weight("right"), 0.25),
        WEIGHTS["a"] + 0.25 * WEIGHTS["left"] @ WEIGHTS["right"],
    ),
    "low rank, mixed": (
        LowRank(Weight("low"), Weight("left"), Weight("right")),
        1 + WEIGHTS["left"] @ WEIGHTS["right"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_expressions(case: str) -> None:
    made, expected = CASES[case]
    again = Originals.unpacked(Originals(("x",), {"x": made}).packed()).made_of["x"]
    assert again == made
    value = again.value(WEIGHTS.__getitem__)
    torch.testing.assert_close(value, expected)
    assert made.shape(lambda name: tuple(WEIGHTS[name].shape)) == tuple(expected.shape)
    assert made.dtype(lambda name: WEIGHTS[name].dtype) == value.dtype


def test_joined_parts_must_fit() -> None:
    with pytest.raises(ValueError, match="do not fit each other along dimension 1"):
        Joined((A, B), dim=1).shape(lambda name: tuple(WEIGHTS[name].shape))


def test_one_after_the_other() -> None:
    """q and k are fused, then the fused one is adapted and renamed; a mask of the first is dropped, renamed or not."""
    first = Originals(("q", "k", "norm"), {}).then(
        {"q": Part(Weight("qk"), 0, 0, 2), "k": Part(Weight("qk"), 0, 2, 4)}, {"mask", "seed"}
    )
    both = first.then(
        {"qk": LowRank(Weight("base"), Weight("up"), Weight("down")), "mask": Weight("masks.0")}
    )
    exported = both.exported(["base", "up", "down", "masks.0", "seed", "norm", "new"], {})
    merged = LowRank(Weight("base"), Weight("up"), Weight("down"))
    assert exported.tensors == {
        "q": Part(merged, 0, 0, 2),
        "k": Part(merged, 0, 2, 4),
        "norm": Weight("norm"),
        "new": Weight("new"),
    }
    assert list(exported.tensors) == ["q", "k", "norm", "new"]
    assert list(both.exported(["up", "down", "norm"], {}).tensors) == [
        "norm",
        "up",
        "down",
    ]  # the base left out


def test_tied_weights() -> None:
    """An adapted head no longer equals the embedding it was tied to, a renamed one does; an expression may use a
    weight that is an original itself."""
    originals = Originals(
        ("embed", "head", "twin"),
        {"head": LowRank(Weight("head.base"), Weight("up"), Weight("down")), "twin": Weight("twin.base")},
    )
    names, aliases = ["embed", "up", "down"], {"head.base": "embed", "twin.base": "embed"}
    exported = originals.exported(names, aliases)
    assert exported.tensors == {
        "embed": Weight("embed"),
        "head": LowRank(Weight("embed"), Weight("up"), Weight("down")),
    }
    assert exported.aliases == {"twin": "embed"}
    shared = Originals(("embed", "head"), {"head": Transposed(Weight("embed"))})
    assert shared.exported(["embed"], {}).tensors == {
        "embed": Weight("embed"),
        "head": Transposed(Weight("embed")),
    }


@dataclass(frozen=True, slots=True)
class Doubled(Expression):
    half: Expression


def test_a_way_back_that_is_not_known_here(caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint may be from a later version, or from a transform with a custom expression."""
    packed = Originals(("a", "b"), {"a": Doubled(Weight("x")), "b": Weight("y")}).packed()
    with caplog.at_level(logging.WARNING):
        originals = Originals.unpacked(packed)
    assert list(originals.exported(["x", "y"], {}).tensors) == ["b", "x"]
