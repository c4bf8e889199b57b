"""``CheckpointHiddenStatesOffload``: what is marked is found when autograd saves it, moved, and comes back as it was.

A CPU has nowhere to move to: the tests that move say that the CPU is a device whose memory is another one.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.transforms.recompute import offload_activations
from deepspeed.transforms.recompute.offload_activations import (
    CheckpointHiddenStatesOffload,
    get_checkpoint_hidden_states_offloading_ctx_manager,
)


def gradients(layers: nn.ModuleList, inputs: torch.Tensor, offload: CheckpointHiddenStatesOffload | None):
    layers.zero_grad()
    hidden = inputs.clone().requires_grad_()
    first = hidden
    for layer in layers:
        if offload is not None:
            offload.mark(hidden)
        hidden = checkpoint(layer, hidden, use_reentrant=False)
    hidden.square().sum().backward()
    return [first.grad, *(param.grad.clone() for param in layers.parameters())]


@pytest.mark.parametrize("use_streams", [False, True])
@pytest.mark.parametrize("keep", [0, 1, 2])
def test_moved_inputs_give_the_same_gradients(monkeypatch, keep: int, use_streams: bool) -> None:
    monkeypatch.setattr(offload_activations, "has_own_memory", lambda device: True)
    torch.manual_seed(1)
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
    inputs = torch.randn(8, 16)
    expected = gradients(layers, inputs, None)
    offload = get_checkpoint_hidden_states_offloading_ctx_manager(
        use_streams=use_streams, min_offload_bytes=0, max_fwd_stash_count=1, keep_last_count=keep
    )
    for step in range(2):
        offload.reset()
        with offload:
            found = gradients(layers, inputs, offload)
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
        stats = offload.stats
        assert stats.marked_tensors == 4 and stats.skipped_marked_tensors == 0
        assert stats.offloaded_tensors == stats.restored_tensors == 4 - keep
        assert stats.kept_last_tensors == keep
        assert stats.offloaded_bytes == stats.restored_bytes == (4 - keep) * inputs.nbytes
        assert offload._pooled == 4 - keep, step


def test_what_stays(monkeypatch) -> None:
    inputs = torch.randn(4, 8)
    layers = nn.ModuleList([nn.Linear(8, 8)])
    offload = CheckpointHiddenStatesOffload(keep_last_count=0)
    with offload:
        gradients(layers, inputs, None)
    assert offload.stats.saved_tensors_seen > 0 and offload.stats.marked_tensors == 0
    with offload:
        gradients(layers, inputs, offload)  # on a CPU
    monkeypatch.setattr(offload_activations, "has_own_memory", lambda device: True)
    with offload:
        gradients(layers, inputs, offload)  # 128 bytes
    stats = offload.stats
    assert (stats.marked_tensors, stats.skipped_marked_tensors, stats.offloaded_tensors) == (2, 2, 0)


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="keep_last_count=-1"):
        CheckpointHiddenStatesOffload(keep_last_count=-1)
    offload = CheckpointHiddenStatesOffload()
    with offload, pytest.raises(RuntimeError, match="not re-entrant"):
        offload.__enter__()


def test_layers_of_transformers_mark_their_inputs() -> None:
    layers = pytest.importorskip("transformers.modeling_layers")

    class Layer(layers.GradientCheckpointingLayer):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states.sin() ** 2

    plain = layers.GradientCheckpointingLayer.__call__
    layer = Layer().train()
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = lambda f, *args: checkpoint(f, *args, use_reentrant=False)
    hidden = torch.randn(4, 8, requires_grad=True)
    outer, inner = (CheckpointHiddenStatesOffload(min_offload_bytes=0) for _ in range(2))
    with outer:
        layer(hidden).sum().backward()
        with inner:
            layer(hidden)
        assert layers.GradientCheckpointingLayer.__call__ is not plain
        layer.eval()(hidden)
    assert layers.GradientCheckpointingLayer.__call__ is plain
    assert (outer.stats.marked_tensors, inner.stats.marked_tensors) == (1, 1)
    assert outer.stats.skipped_marked_tensors == 1 and hidden.grad is not None
    with pytest.raises(KeyError), outer:
        raise KeyError
    assert layers.GradientCheckpointingLayer.__call__ is plain
