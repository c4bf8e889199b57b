"""A client's state is restored equal, including types, or saving refuses it with the key path."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import math
import pathlib
import random
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.files.archive_reader import deserialize, read_archive
from deepspeed.checkpoint.files.archive_writer import serialize, write_archive
from deepspeed.checkpoint.reader import materialize
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.checkpoint.models import config, make_engine
from tests.pool import distributed


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Settings:
    class Kind(enum.Enum):
        PLAIN = 1

    lr: float = 0.1


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class MyDict(dict):
    pass


class MyInt(int):
    pass


class Log:
    """Pickles something else than itself, as the log of MMEngine does."""

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": True}


def round_trip(folder: Path, value: Any) -> Any:
    write_archive(folder / "f.pt", {"client": value}, checksums=True)
    return materialize(read_archive(folder / "f.pt")["client"])


def same(one: Any, other: Any) -> bool:
    """A separate equality, for values without cycles."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        dense = [t.to_dense() if t.layout != torch.strided else t for t in (one, other)]
        return one.dtype == other.dtype and one.requires_grad == other.requires_grad and torch.equal(*dense)
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, dict):
        factories = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        return factories and same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple, deque)):
        bounds = getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return bounds and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, types.SimpleNamespace):
        return same(vars(one), vars(other))
    if isinstance(one, float):
        return (
            one == other and math.copysign(1, one) == math.copysign(1, other) or one != one and other != other
        )
    return one == other


LEAVES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        2**31,
        2**70,
        0.5,
        -0.0,
        float("nan"),
        float("inf"),
        1 + 2j,
        "",
        "a\udc80\n",
        "\u00e9",
    ),
    *(b"", b"\x00\xff", bytearray(b"x"), range(3), slice(1, None), frozenset({1, "a"}), {1, 2}, set(), ()),
    *(
        np.float32(2.5),
        np.int8(-1),
        np.bool_(True),
        np.arange(4).reshape(2, 2),
        np.array(["a", "bc"]),
        np.array(1.0),
    ),
    *(
        np.array([1.0, np.nan]),
        np.datetime64("2026-01-01"),
        torch.float16,
        torch.device("cpu"),
        torch.Size([2, 3]),
    ),
    *(
        pathlib.Path("/a"),
        pathlib.PureWindowsPath("c:/x"),
        datetime.datetime(2026, 1, 2),
        datetime.timedelta(3),
    ),
    *(
        decimal.Decimal("1.50"),
        uuid.UUID(int=5),
        types.SimpleNamespace(a=[1]),
        int,
        OrderedDict,
        torch.strided,
    ),
    *(Color.RED, Level.LOW, Color),
]


def leaf(rng: random.Random) -> Any:
    if rng.random() < 0.6:
        return rng.choice(LEAVES)
    x = torch.randn(rng.choice([(), (0,), (3,), (2, 3)]), dtype=rng.choice([torch.float32, torch.complex64]))
    views = [
        lambda: x,
        lambda: x.conj(),
        lambda: x.conj().imag if x.is_complex() else x,
        lambda: x.mT if x.dim() == 2 else x,
        lambda: x.detach().clone().requires_grad_(),
        lambda: nn.Parameter(x.detach().clone(), requires_grad=rng.random() < 0.5),
        lambda: torch.eye(3).to_sparse(),
        lambda: x.expand(4, *x.shape),
        lambda: x.to(torch.bfloat16) if not x.is_complex() else x,
    ]
    return rng.choice(views)()


def value(rng: random.Random, depth: int) -> Any:
    """Something nested, of any of the kinds that are kept."""
    if depth == 0 or rng.random() < 0.2:
        return leaf(rng)
    items = [value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    keys = rng.sample(["a", "b", 1, 2.5, (1, "x"), None, True, b"k"], len(items))
    pairs = list(zip(keys, items, strict=True))
    makers = [
        lambda: items,
        lambda: tuple(items),
        lambda: deque(items, maxlen=rng.choice([None, 5])),
        lambda: dict(pairs),
        lambda: OrderedDict(pairs),
        lambda: defaultdict(rng.choice([None, int, list, dict, set, float, OrderedDict, Counter]), pairs),
        lambda: Counter("hello"),
        lambda: types.SimpleNamespace(**{f"n{i}": item for i, item in enumerate(items)}),
        lambda: [items, items],
    ]
    return rng.choice(makers)()


@pytest.mark.parametrize("seed", range(8))
def test_values_of_many_kinds_come_back_equal(tmp_path, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(12):
        saved = value(rng, depth=4)
        assert same(round_trip(tmp_path, saved), saved)


@pytest.mark.parametrize("one", LEAVES, ids=lambda leaf: type(leaf).__name__)
def test_each_leaf(tmp_path, one):
    assert same(round_trip(tmp_path, one), one)


def test_what_refers_to_itself_and_what_is_shared(tmp_path):
    cycle: dict[str, Any] = {"name": "a", "list": []}
    cycle["self"] = cycle
    cycle["list"].append(cycle["list"])
    shared = torch.randn(3)
    cycle["twice"] = [shared, shared, shared.view(3, 1)]
    found = round_trip(tmp_path, cycle)
    assert found["self"] is found and found["list"][0] is found["list"] and found["name"] == "a"
    one, two, three = found["twice"]
    assert one is two and torch.equal(one, shared) and torch.equal(three, shared.view(3, 1))


def self_containing_tuple() -> Any:
    inner: list[Any] = []
    inner.append((inner, 1))
    return inner[0]


def self_containing_default() -> Any:
    found: Any = defaultdict(list)
    found["me"] = found
    return found


REFUSED: dict[str, Any] = {
    "namedtuple": lambda: Point(1, 2),
    "dataclass": Settings,
    "enum of a class in a class": lambda: Settings.Kind.PLAIN,
    "subclass of dict": lambda: MyDict(a=1),
    "subclass of int": lambda: MyInt(3),
    "function": lambda: round_trip,
    "lambda": lambda: lambda: 0,
    "factory": lambda: defaultdict(Settings),
    "lambda as factory": lambda: defaultdict(lambda: 0),
    "partial": lambda: functools.partial(int, base=2),
    "generator": lambda: (i for i in range(3)),
    "chain map": lambda: collections.ChainMap({}),
    "mapping proxy": lambda: types.MappingProxyType({}),
    "object array": lambda: np.array([{}, None], dtype=object),
    "module": lambda: nn.Linear(2, 2),
    "bare storage": lambda: torch.ones(2).untyped_storage(),
    "tuple in itself": self_containing_tuple,
    "defaultdict in itself": self_containing_default,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_come_back_is_refused_with_its_key_path(tmp_path, kind):
    content = {"fine": 1, "mine": {"deep": [0, REFUSED[kind]()]}}
    with pytest.raises(CheckpointError) as caught:
        write_archive(tmp_path / "f.pt", content)
    assert "'mine'['deep'][1]" in str(caught.value) or kind == "bare storage", caught.value
    assert "'fine'" not in str(caught.value)


def test_allowed_classes_come_back(tmp_path):
    with torch.serialization.safe_globals([Point, Settings]):
        saved = [Point(1, 2), Settings(0.5)]
        found = round_trip(tmp_path, saved)
    assert found == saved and [type(item) for item in found] == [Point, Settings]
    with (
        torch.serialization.safe_globals([MyDict]),
        pytest.raises(CheckpointError, match=r"under 'client'\[0\]: .*dict"),
    ):
        round_trip(tmp_path, [MyDict(a=1)])  # torch's reader fills no dicts of other classes


def test_any_class_comes_back_when_the_user_trusts_all_files(tmp_path, monkeypatch):
    saved = {"settings": Settings(0.5), "function": round_trip, "plain": {"a": 1}}
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    found = round_trip(tmp_path, saved)
    assert found == saved and deserialize(serialize(saved)) == saved
    assert vars(round_trip(tmp_path, Log())) == {"kept": True}
    round_trip(tmp_path, saved)
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    with pytest.raises(
        CheckpointError, match="Settings, which is not loaded.*TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    ):
        read_archive(tmp_path / "f.pt")


@distributed(world_size=2)
def test_client_state_schedule_and_data_position(tmp_path):
    """The same holds wherever a client's state goes."""
    engine = make_engine(config(1, scheduler=None))
    engine.lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(
        torch.optim.SGD([torch.zeros(1)], 0.1), [2, 2, 5]
    )
    state = {"seen": Counter("aab"), "by": defaultdict(list, a=[1]), "order": OrderedDict(b=1, a=2)}
    state["me"] = state
    engine.save_checkpoint(tmp_path, client_state={"mine": state})
    engine.lr_scheduler.milestones = Counter()
    found = engine.load_checkpoint(tmp_path)[1]["mine"]
    assert found["me"] is found and found.pop("me") and state.pop("me")
    assert same(found, state)
    assert engine.lr_scheduler.milestones == Counter({2: 2, 5: 1})
    with pytest.raises(CheckpointError, match=r"Settings under 'mine'\['deep'\]\[0\]"):
        engine.save_checkpoint(tmp_path, client_state={"mine": {"deep": [Settings()]}})


@distributed(world_size=2)
def test_a_tag_may_end_in_a_slash(tmp_path):
    engine = make_engine(config(1))
    engine.save_checkpoint(tmp_path, tag="one/two/")
    latest = tmp_path / "latest"
    assert latest.read_text() == "one/two" and engine.load_checkpoint(tmp_path, "one/two/")[0]
    assert (
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "one/two/").keys()
        == engine.module_state_dict().keys()
    )
    torch.distributed.barrier()
    latest.write_text("one/two/")  # as release 0.19 writes it
    torch.distributed.barrier()
    assert engine.load_checkpoint(tmp_path)[0]
