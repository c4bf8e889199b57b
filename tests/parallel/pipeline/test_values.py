"""Values passed between stages: nests of tensors."""

from __future__ import annotations

import pytest
import torch

from deepspeed.parallel.pipeline.messages.encoding import describe
from deepspeed.parallel.pipeline.messages.values import (
    mean_of,
    to_device,
    without_graph,
    writable,
)
from deepspeed.zero.gradients.backward import tensors_in


def test_means_of_nests() -> None:
    one = {"logits": torch.tensor([1.0, 2.0]), "rest": (torch.tensor([1, 2]), "name", None)}
    two = {"logits": torch.tensor([3.0, 4.0]), "rest": (torch.tensor([2, 2]), "name", None)}
    found = mean_of([one, two])
    assert torch.equal(found["logits"], torch.tensor([2.0, 3.0]))
    assert torch.equal(found["rest"][0], torch.tensor([1.5, 2.0])) and found["rest"][1:] == ("name", None)
    with pytest.raises(ValueError, match=r"\(2,\), \(1,\) cannot be averaged: set reduce_output=None"):
        mean_of([torch.zeros(2), torch.zeros(1)])


def test_what_was_received_may_change_in_place() -> None:
    leaf = torch.tensor([-1.0, 2.0], requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        leaf.relu_()
    given, mask = writable((leaf, {"mask": torch.ones(2, dtype=torch.bool)}))
    assert given.data_ptr() == leaf.data_ptr() and mask["mask"].all()
    (given.relu_() * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.tensor([0.0, 3.0]))


def test_other_types_stay() -> None:
    nest = {"a": [torch.ones(1, requires_grad=True), 2], "b": ("text", None)}
    found = without_graph(to_device(nest, torch.device("cpu")))
    assert found["b"] == ("text", None) and found["a"][1] == 2
    assert [tensor.requires_grad for tensor in tensors_in(found)] == [False]


class Rounded(float):
    def __repr__(self) -> str:
        return f"{self:.1f}"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Rounded(0.11), Rounded(0.12)),
        (0.5, "0.5"),
        (None, "None"),
        (1, True),
        (({"a": None}, "b"), ({"a": None, "b": None},)),
        ({"a": {"b": None}}, {"a": None, "b": None}),
        ([torch.ones(2)], (torch.ones(2),)),
    ],
)
def test_marks_of_unlike_messages_differ(one: object, other: object) -> None:
    """A receiver reads a message by the outline of an earlier one with the same marks."""
    assert describe(one)[0] != describe(other)[0]
    assert describe(one)[0] == describe(one)[0]
