from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import close_pool


@pytest.fixture(scope="session", autouse=True)
def _pool_ends_with_the_session() -> Iterator[None]:
    yield
    close_pool()
