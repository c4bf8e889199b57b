"""One tensor-parallel rank of domino.py."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class DominoRank:
    """Args: ``schedule``: halves, layer or whole (the batch in one piece). A step is a forward, a backward and an
    update of all weights."""

    def __init__(self, schedule: str, hidden: int, layers: int, batch: int, context: int) -> None:
        import deepspeed
        from deepspeed.runtime.domino.transformer import DominoTransformer, ModelType

        deepspeed.init_distributed("gloo")

        def drawn(weight: torch.Tensor) -> None:
            nn.init.normal_(weight, std=0.02)

        config = SimpleNamespace(
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=4 * hidden,
            num_attention_heads=8,
            kv_channels=hidden // 8,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            layernorm_epsilon=1e-5,
            add_bias_linear=True,
            gated_linear_unit=False,
            apply_residual_connection_post_layernorm=False,
            params_dtype=torch.float32,
            perform_initialization=True,
            init_method=drawn,
            output_layer_init_method=drawn,
            domino_intra_layer_overlap=schedule == "layer",
        )
        mpu: Any = SimpleNamespace(
            get_tensor_model_parallel_group=lambda: dist.group.WORLD,
            get_tensor_model_parallel_world_size=dist.get_world_size,
        )
        torch.manual_seed(0)
        self.model = DominoTransformer(config, mpu, lambda x, _: x, ModelType.encoder_or_decoder)
        self.input = torch.randn(context, batch, hidden, requires_grad=True)
        if schedule == "whole":  # the same, without a second half that could be computed meanwhile
            self.input.chunk = lambda *_, **__: (self.input,)  # type: ignore[method-assign]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loss = 0.0
        self.run(2)

    def run(self, steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(self.input, None).square().mean()
            loss.backward()
            self.optimizer.step()
            self.loss = loss.item()
        return (time.perf_counter() - begin) / steps

    def describe(self) -> dict[str, Any]:
        return {"loss": self.loss}
