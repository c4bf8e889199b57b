"""Parallel layers against the whole ones: loss and every gradient, in fp32."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from deepspeed.checkpoint.placement import placement_of
from tests.pool import distributed
from tests.tensor_parallel.blocks import Model, batch, split, tensor_parallel

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def own_part(whole: Tensor, param: nn.Parameter) -> Tensor:
    """What this rank has of a tensor of the whole model."""
    placement = placement_of(param)
    if not placement.boxes:
        return whole
    parts = [whole[tuple(slice(*side) for side in box)] for box in placement.boxes]
    sizes = [{box[dim] for box in placement.boxes} for dim in range(whole.dim())]
    dim = next((dim for dim, found in enumerate(sizes) if len(found) > 1), 0)
    return torch.cat(parts, dim)


def assert_gradients(module: nn.Module, reference: nn.Module) -> None:
    whole = dict(reference.named_parameters())
    for name, param in module.named_parameters():
        expected = whole[name].grad
        assert expected is not None and param.grad is not None, name
        scale = expected.abs().max().item()
        torch.testing.assert_close(
            param.grad,
            own_part(expected, param),
            msg=lambda m, n=name: f"{n}: {m}",
            rtol=1e-5,
            atol=1e-5 * scale,
        )


@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize(
    ("world_size", "heads"), [(2, (6, 2)), (2, (5, 1)), (3, (4, 2)), (4, (6, 2)), (4, (3, 3))]
)
@distributed()
def test_a_block_in_parts_computes_like_a_whole_one(
    world_size: int, heads: tuple[int, int], by_sequence: bool
) -> None:
    reference = Model(*heads)
    expected = reference(*batch())
    expected.backward()
    model = split(Model(*heads), tensor_parallel().communicator("tp"), by_sequence=by_sequence)
    loss = model(*batch())
    loss.backward()
    torch.testing.assert_close(loss, expected, **CLOSE)
    assert_gradients(model, reference)
