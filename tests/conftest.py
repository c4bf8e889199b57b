from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator

import pytest

from tests.pool import close_pool


def pytest_collection_finish() -> None:
    """Keep 14,000 tests out of later collections of garbage: each would take a second to look at them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _pool_ends_with_the_session() -> Iterator[None]:
    yield
    close_pool()


@pytest.fixture(autouse=True)
def _the_same_numbers_in_any_order() -> None:
    """Seed the test, so that its random numbers do not depend on earlier tests; ranks of the pool seed themselves."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return start and size of the memory for which huge pages would be requested, without a system call."""
    from deepspeed.ops import huge_pages

    asked: list[tuple[int, int]] = []

    def advise(begin: int, size: int, advice: int) -> int:
        assert advice == 25
        asked.append((begin, size))
        return 0

    monkeypatch.setattr(huge_pages, "_madvise", lambda: advise)
    return asked


@pytest.fixture(autouse=True)
def _no_process_group_is_left_behind() -> Iterator[None]:
    """In the process of pytest: later tests would take it for theirs. (Ranks of the pool are compared with before.)"""

    def exists() -> bool:
        dist = sys.modules.get("torch.distributed")
        return dist is not None and dist.is_initialized()

    before = exists()
    yield
    left = exists() and not before
    if left:
        sys.modules["torch.distributed"].destroy_process_group()
    assert not left, "the test left a process group behind"
