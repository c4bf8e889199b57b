from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.pool import close_pool


@pytest.fixture(scope="session", autouse=True)
def _pool_ends_with_the_session() -> Iterator[None]:
    yield
    close_pool()


@pytest.fixture(autouse=True)
def _the_same_numbers_in_any_order() -> None:
    """What a test draws does not depend on the tests before it; ranks of the pool are seeded there."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
