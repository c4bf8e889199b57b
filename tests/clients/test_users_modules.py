"""Hooks, buffers, attributes and names that a user gave the modules of a model stay, whatever changes the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.compression.compress import init_compression
from deepspeed.linear import LoRAConfig, QuantizationConfig
from deepspeed.linear import init_lora as add_adapters
from deepspeed.linear.context_manager import Init
from tests.pool import distributed

pytest.importorskip("transformers", reason="the clients extra is not installed")

from tests.clients.kit import llama
from tests.clients.test_expert_parallel import make

WEIGHTS = {
    "shared_parameters": {"enabled": True, "schedule_offset": 0, "quantize_weight_in_forward": True},
    "different_groups": {
        "all": {"params": {"start_bits": 8, "target_bits": 8, "quantization_period": 1}, "modules": ["proj"]}
    },
}
SECTIONS: dict[str, dict[str, Any]] = {
    "tensor parallelism": {"tensor_parallel": {"autotp_size": 2}},
    "expert parallelism": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    "sequence parallelism": {"sequence_parallel_size": 2},
    "adapters": {},
    "quantized weights below adapters": {},
    "compression": {"compression_training": {"weight_quantization": WEIGHTS}},
}
TAKE_PLACES = {"tensor parallelism", "compression"}
"""Those that put layers of other classes into the places of linear layers and embeddings."""


def model_for(kind: str) -> Any:
    if kind == "expert parallelism":
        return make("mixtral")
    if "adapters" in kind:
        quantization = None if kind == "adapters" else QuantizationConfig(q_bits=8, group_size=16)
        with Init(LoRAConfig(lora_r=2, target_mods=["q_proj"]), quantization):
            return llama(num_attention_heads=4)
    return llama(num_attention_heads=4)


class Marks:
    """Attach what a user may leave on every module of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.called: list[str] = []
        self.handles = []
        for name, module in self.modules.items():
            self.handles += [module.register_forward_pre_hook(self._noting(f"before {name}"))]
            self.handles += [module.register_forward_hook(self._noting(f"after {name}"))]
            module.register_buffer("of_user", torch.tensor([len(name)]), persistent=False)
            module.register_buffer("kept_of_user", torch.tensor([-len(name)]))
            module.name_of_user = name

    def _noting(self, what: str) -> Callable[..., None]:
        return lambda *_: self.called.append(what)

    def calls(self, forward: Callable[[], Any]) -> list[str]:
        self.called.clear()
        forward()
        return sorted(self.called)


@pytest.mark.parametrize("kind", SECTIONS)
@distributed(world_size=2)
def test_what_a_user_left_on_modules_stays(kind: str) -> None:
    model, ids = model_for(kind), torch.arange(8).view(1, 8)
    marks = Marks(model)
    expected = marks.calls(lambda: model(input_ids=ids, labels=ids))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, **SECTIONS[kind]}
    if kind == "compression":
        init_compression(model, config)
    elif "adapters" in kind:
        add_adapters(model)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    assert marks.calls(lambda: engine(input_ids=ids, labels=ids)) == expected
    now = dict(model.named_modules())
    for name, before in marks.modules.items():
        found = now[name]
        assert found.name_of_user == name and found.of_user.tolist() == [len(name)], name
        assert found.kept_of_user.tolist() == [-len(name)], name
        assert found._non_persistent_buffers_set >= {"of_user"} and "kept_of_user" in found.state_dict(), name
        assert "of_user" not in found.state_dict(), name
        linear = isinstance(before, nn.Linear | nn.Embedding)
        assert found is before or kind in TAKE_PLACES and linear, name
    for handle in marks.handles:
        handle.remove()
    assert not marks.calls(lambda: engine(input_ids=ids, labels=ids))
    engine.destroy()
