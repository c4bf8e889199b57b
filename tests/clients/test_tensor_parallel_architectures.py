"""Every architecture, split by its graph: loss and every gradient as on one rank (ranks are threads here)."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the clients extra is not installed")

from tests.clients.architectures import ARCHITECTURES, Comparison, compare

UNEVEN = ("llama", "gpt2", "phi3", "t5", "mistral", "gpt_neox", "bart", "vit", "gemma")
"""With 4 heads on 3 ranks."""


def assert_parity(found: Comparison) -> None:
    assert any(each.kind == "row" for each in found.plan.parameters.values()), found.plan.describe()
    assert found.loss <= 1e-5, found
    assert found.gradient <= 1e-5, (found.worst, found.gradient)
    assert found.in_parts is any(each.heads for each in found.plan.vocabulary)


@pytest.mark.parametrize("name", ["gemma", "phi3", "gpt2"])
def test_fused_shared_and_transposed_projections(name: str) -> None:
    assert_parity(compare(name, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_architecture_has_one_rank_s_gradients(name: str, ranks: int) -> None:
    assert_parity(compare(name, ranks))


@pytest.mark.slow
@pytest.mark.parametrize("name", UNEVEN)
def test_heads_that_do_not_divide(name: str) -> None:
    assert_parity(compare(name, 3))
