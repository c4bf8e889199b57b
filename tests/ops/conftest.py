from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deepspeed.ops import native


@pytest.fixture(params=native.ISA_NAMES)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with each instruction set that this machine has."""
    lib = native.library()
    if lib is None:
        pytest.skip("built without native kernels")
    before = lib.ds_isa()
    wanted = native.ISA_NAMES.index(request.param)
    if lib.ds_set_isa(wanted) != wanted:
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    lib.ds_set_isa(before)


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package had been built without a compiler."""
    monkeypatch.setattr(native, "library", lambda: None)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
