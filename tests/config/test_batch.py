from __future__ import annotations

import pytest

from deepspeed.config.batch import DEFAULT, DERIVED, GAS, GIVEN, MICRO, TRAIN, BatchError, resolve

# (train, micro, accumulation, ranks) -> (train, micro, accumulation)
FITTING = [
    ((8, None, None, 1), (8, 8, 1)),
    ((8, None, None, 2), (8, 4, 1)),
    ((8, None, None, 8), (8, 1, 1)),
    ((1, None, None, 1), (1, 1, 1)),
    ((96, None, None, 3), (96, 32, 1)),
    ((None, 4, None, 1), (4, 4, 1)),
    ((None, 4, None, 2), (8, 4, 1)),
    ((None, 4, None, 512), (2048, 4, 1)),
    ((None, 1, None, 7), (7, 1, 1)),
    ((None, 4, 2, 1), (8, 4, 2)),
    ((None, 4, 2, 3), (24, 4, 2)),
    ((None, 3, 5, 7), (105, 3, 5)),
    ((None, 1, 1, 1), (1, 1, 1)),
    ((32, 4, None, 1), (32, 4, 8)),
    ((32, 4, None, 2), (32, 4, 4)),
    ((32, 4, None, 8), (32, 4, 1)),
    ((30, 5, None, 3), (30, 5, 2)),
    ((32, None, 4, 1), (32, 8, 4)),
    ((32, None, 4, 2), (32, 4, 4)),
    ((32, None, 4, 8), (32, 1, 4)),
    ((30, None, 5, 3), (30, 2, 5)),
    ((32, 4, 8, 1), (32, 4, 8)),
    ((32, 4, 4, 2), (32, 4, 4)),
    ((32, 4, 1, 8), (32, 4, 1)),
    ((105, 3, 5, 7), (105, 3, 5)),
    ((65536, 64, 16, 64), (65536, 64, 16)),
    ((32768, 32, None, 1024), (32768, 32, 1)),
    ((256, None, 1, 256), (256, 1, 1)),
    ((6, 6, 1, 1), (6, 6, 1)),
    ((12, 2, 3, 2), (12, 2, 3)),
]

# (train, micro, accumulation, ranks) -> text of the message, besides the given numbers
UNFIT = [
    ((None, None, None, 1), ["neither", TRAIN, MICRO]),
    ((None, None, 4, 2), ["neither", TRAIN, MICRO]),
    ((0, None, None, 1), [TRAIN, "at least 1"]),
    ((-8, None, None, 1), [TRAIN, "at least 1"]),
    ((8, 0, None, 1), [MICRO, "at least 1"]),
    ((None, 0, 1, 1), [MICRO, "at least 1"]),
    ((8, None, 0, 1), [GAS, "at least 1"]),
    ((8, 1, -1, 1), [GAS, "at least 1"]),
    ((8, None, None, 0), ["ranks", "at least 1"]),
    ((8, None, None, 3), ["6 or 9"]),
    ((7, None, None, 2), ["6 or 8"]),
    ((2, None, None, 4), [f"{TRAIN} 4"]),
    ((1, None, None, 2), [f"{TRAIN} 2"]),
    ((100, None, None, 64), ["64 or 128"]),
    ((8, 3, None, 1), ["6 or 9", f"{MICRO} 2 or 4"]),
    ((8, 3, None, 2), ["6 or 12", f"{MICRO} 2 or 4"]),
    ((10, 4, None, 2), ["8 or 16", f"{MICRO} 1 or 5"]),
    ((8, 16, None, 1), [f"{TRAIN} 16", f"{MICRO} 8"]),
    ((64, 3, None, 8), ["48 or 72", f"{MICRO} 2 or 4"]),
    ((8, None, 3, 1), ["6 or 9", f"{GAS} 2 or 4"]),
    ((8, None, 16, 1), [f"{TRAIN} 16", f"{GAS} 8"]),
    ((30, None, 4, 3), ["24 or 36", f"{GAS} 2 or 5"]),
    ((7, None, 2, 2), ["4 or 8"]),
    ((8, 2, 1, 1), [f"{TRAIN} 2", f"{GAS} 4", f"{MICRO} 8", "4 data-parallel ranks"]),
    ((2, 1, 1, 1), [f"{TRAIN} 1", "2 data-parallel ranks"]),
    ((8, 2, 1, 4 + 1), [f"{TRAIN} 10", "4 data-parallel ranks"]),
    ((8, 1, 1, 4), [f"{TRAIN} 4", f"{GAS} 2", f"{MICRO} 2", "8 data-parallel ranks"]),
    ((9, 2, 2, 2), [f"{TRAIN} 8"]),
    ((33, 4, 4, 2), [f"{TRAIN} 32"]),
    ((64, 8, 2, 8), [f"{TRAIN} 128", f"{GAS} 1", f"{MICRO} 4", "4 data-parallel ranks"]),
    ((1, 2, 2, 2), [f"{TRAIN} 8"]),
    ((1024, 3, 7, 5), [f"{TRAIN} 105"]),
]


@pytest.mark.parametrize(("given", "expected"), FITTING)
def test_fits(given: tuple[int | None, int | None, int | None, int], expected: tuple[int, int, int]) -> None:
    batch = resolve(*given)
    assert (batch.train, batch.micro, batch.accumulation) == expected
    assert (
        batch.train
        == batch.micro * batch.accumulation * batch.dp_world
        == batch.micro * batch.accumulation * given[3]
    )
    for key, value in zip((TRAIN, MICRO, GAS), given, strict=False):
        assert (batch.origin[key] == GIVEN) == (value is not None)


@pytest.mark.parametrize(("given", "said"), UNFIT)
def test_does_not_fit(given: tuple[int | None, int | None, int | None, int], said: list[str]) -> None:
    with pytest.raises(BatchError) as caught:
        resolve(*given, world_from="as tested")
    message = str(caught.value)
    assert all(part in message for part in said), message
    if "Nearest" in message or "Change one" in message:
        shown = [value for value in given[:3] if value is not None]
        assert all(str(value) in message for value in (*shown, given[3])), "the numbers at hand are named"
        assert "as tested" in message


def test_enough_combinations() -> None:
    assert len(FITTING) + len(UNFIT) >= 60


@pytest.mark.parametrize(("given", "said"), UNFIT)
def test_every_choice_that_is_offered_fits(given: tuple[int, int, int, int], said: list[str]) -> None:
    """The remedies named in a message really resolve."""
    with pytest.raises(BatchError) as caught:
        resolve(*given)
    message = str(caught.value)
    if "fit: " not in message and "them: " not in message:
        return
    offers = message.split("fit: " if "fit: " in message else "them: ")[1].split(";")[0].split(", or ")
    assert offers
    for offer in offers:
        numbers = [int(word) for word in offer.split() if word.isdigit()]
        for number in numbers:
            changed = dict(zip((TRAIN, MICRO, GAS, "ranks"), given, strict=True))
            key = next((key for key in (TRAIN, MICRO, GAS) if offer.startswith(key)), "ranks")
            changed[key] = number
            assert resolve(*changed.values()).train


def test_origins() -> None:
    batch = resolve(32, 4, None, 2)
    assert batch.origin == {TRAIN: GIVEN, MICRO: GIVEN, GAS: DERIVED}
    assert resolve(None, 4, None, 2).origin == {TRAIN: DERIVED, MICRO: GIVEN, GAS: DEFAULT}
    assert resolve(8, None, None, 2).origin == {TRAIN: GIVEN, MICRO: DERIVED, GAS: DEFAULT}
    assert str(batch) == (
        "train_batch_size 32 (given) = train_micro_batch_size_per_gpu 4 (given)"
        " x gradient_accumulation_steps 4 (derived) x 2 data-parallel ranks"
    )
