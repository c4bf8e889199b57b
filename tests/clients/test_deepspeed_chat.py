"""Uses of engines in DeepSpeed-Chat's scripts: their configs, value models that run by their own method, adapters on
weights that are already partitioned, and merging them before whole weights are saved."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.compression.helper import recursive_getattr, recursive_setattr
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.config import DeepSpeedConfig
from tests.clients.kit import assert_same_weights, clean_clients, llama, whole_weights
from tests.clients.test_rlhf_engines import LowRank, absent, padded_prompts
from tests.pool import distributed

pytest.importorskip("transformers", reason="the clients extra is not installed")


def training(stage: int, dtype: str | None = None, *, offload: bool = False, **more: Any) -> dict[str, Any]:
    """As the scripts write it for a model that trains."""
    place = {"device": "cpu" if offload else "none"}
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "offload_param": dict(place),
            "offload_optimizer": dict(place),
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {
            "enabled": False,
            "max_out_tokens": 512,
            "inference_tp_size": 1,
            "release_inference_cache": False,
            "pin_parameters": True,
            "tp_gather_partition_size": 8,
        },
        "tensorboard": {"enabled": False, "output_path": "/ds_tensorboard_logs/", "job_name": "_tensorboard"},
    }
    if dtype is not None:
        config[dtype] = {"enabled": True} | ({"loss_scale_window": 100} if dtype == "fp16" else {})
    return config | more


def frozen(stage: int, dtype: str | None = None, *, offload: bool = False) -> dict[str, Any]:
    """As they write it for a reference or a reward model."""
    config = training(stage, dtype)
    config["zero_optimization"] = {
        "stage": stage,
        "stage3_param_persistence_threshold": 1e4,
        "offload_param": {"device": "cpu" if offload else "none"},
        "memory_efficient_linear": False,
    }
    del config["hybrid_engine"], config["tensorboard"]
    return config


@distributed(world_size=2)
def test_their_configs_are_accepted() -> None:
    for stage, dtype, offload in itertools.product(range(4), ("fp16", "bfloat16"), (False, True)):
        for config in (training(stage, dtype, offload=offload), frozen(stage, dtype, offload=offload)):
            read = DeepSpeedConfig(config)
            assert read.zero_optimization_stage == stage and read.fp16_enabled == (dtype == "fp16")
            assert read.bfloat16_enabled == (dtype == "bfloat16")


class Critic(nn.Module):
    """Scores by ``forward_value``; its ``forward`` is another loss."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.base = llama(seed).model
        self.v_head = nn.Linear(16, 1, bias=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.forward_value(tokens, mask).square().mean()

    def forward_value(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.base(tokens, attention_mask=mask, use_cache=False).last_hidden_state
        return self.v_head(hidden).squeeze(-1)

    def gradient_checkpointing_enable(self) -> None:
        self.base.gradient_checkpointing_enable()

    def gradient_checkpointing_disable(self) -> None:
        self.base.gradient_checkpointing_disable()


def critic_of(stage: int, dtype: str | None, offload: bool, more: dict[str, Any]) -> Any:
    model = Critic(1)
    kind = DeepSpeedCPUAdam if offload else FusedAdam
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    optimizer = kind(groups, lr=1e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    config = training(stage, dtype, offload=offload, **more)
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]


@pytest.mark.parametrize(
    ("stage", "dtype", "offload"),
    [(0, "fp16", False), (2, "bf16", False), (3, None, True), (3, "bf16", False)],
)
@distributed(world_size=2)
def test_a_value_model_runs_by_a_method_of_its_own(stage: int, dtype: str | None, offload: bool) -> None:
    """Trained bit for bit as through ``forward``; in between, it runs without gradients, and recomputes."""
    with clean_clients(deepspeed_state=False):
        tokens, mask = padded_prompts()
        engines = [critic_of(stage, dtype, offload, {}) for _ in range(2)]
        asking = frozen(3 if stage == 3 else 0, dtype, offload=offload)
        judge = deepspeed.initialize(model=Critic(1), config=asking)[0].eval()
        with torch.no_grad():
            before = judge.forward_value(tokens, mask)
        for step in range(3):
            by_value, by_forward = engines
            by_value.eval()
            with torch.no_grad():
                asked = by_value.forward_value(tokens, mask)
            assert dtype == "fp16" or torch.equal(asked, before) == (step == 0)  # its first steps overflow
            by_value.train()
            if step:
                by_value.gradient_checkpointing_enable()
            by_value.backward(by_value.forward_value(tokens, mask).square().mean())
            by_forward.backward(by_forward(tokens, mask))
            assert not by_value.optimizer.check_overflow(external=True) or dtype == "fp16"
            for engine in engines:
                engine.step()
            by_value.gradient_checkpointing_disable()
            assert by_value.get_lr() == by_forward.get_lr()
        assert_same_weights(*(whole_weights(engine) for engine in engines))
        with torch.no_grad():
            assert torch.equal(judge.forward_value(tokens, mask), before)


def adapted(stage: int, folder: Path) -> nn.Module:
    """Adapters of plain parameters on weights that stage 3 partitions while they are loaded; only they train."""
    from transformers import LlamaForCausalLM
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    if torch.distributed.get_rank() == 0:
        llama().save_pretrained(folder)
    torch.distributed.barrier()
    kept = HfDeepSpeedConfig(training(3)) if stage == 3 else None
    model = LlamaForCausalLM.from_pretrained(folder)
    del kept
    torch.manual_seed(3)
    for name, layer in [each for each in model.named_modules() if isinstance(each[1], nn.Linear)]:
        if "q_proj" in name or "down_proj" in name:
            recursive_setattr(model, name, Shaped(layer))
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name)
    model.enable_input_require_grads()
    return model


class Shaped(LowRank):
    """Asks a partitioned weight for its shape."""

    def __init__(self, layer: nn.Linear) -> None:
        rows, columns = getattr(layer.weight, "ds_shape", layer.weight.shape)
        whole = nn.Linear(columns, rows, bias=False)
        super().__init__(whole)
        self.weight = layer.weight.requires_grad_(False)


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_adapters_are_folded_in_and_saved(stage: int, tmp_path: Path) -> None:
    with clean_clients(deepspeed_state=False):
        model = adapted(stage, tmp_path)
        params = [param for param in model.parameters() if param.requires_grad]
        config = training(stage, hybrid_engine={"enabled": True, "max_out_tokens": 10})
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        engine: Any = deepspeed.initialize(model=model, optimizer=FusedAdam(params, lr=1e-2), config=config)[
            0
        ]
        tokens, mask = padded_prompts()
        engine.gradient_checkpointing_enable()
        for _ in range(2):
            engine.eval()
            with torch.no_grad():
                made = engine.module.generate(
                    tokens, attention_mask=mask, max_length=10, pad_token_id=0, synced_gpus=stage == 3
                )
            assert made.shape[1] <= 10
            engine.train()
            loss = engine(made, attention_mask=made.ne(0).long(), labels=made, use_cache=False).loss
            engine.backward(loss)
            engine.step()
        engine.gradient_checkpointing_disable()
        before = whole_weights(engine)
        names = [name for name, layer in engine.named_modules() if isinstance(layer, LowRank)]
        assert len(names) == 4 and all(name.startswith("module.") for name in names)
        for name in names:
            layer = recursive_getattr(engine, name)
            wanted = absent([layer.weight, layer.bias, layer.lora_left_weight, layer.lora_right_weight])
            with deepspeed.zero.GatheredParameters(wanted, modifier_rank=0, enabled=stage == 3):
                layer.fuse_lora_weight()
        after = whole_weights(engine)
        for name in (each.removeprefix("module.") for each in names):
            right, left = (before[f"{name}.lora_{side}_weight"] for side in ("right", "left"))
            torch.testing.assert_close(after[f"{name}.weight"], before[f"{name}.weight"] + (right @ left).T)
            assert not torch.equal(after[f"{name}.weight"], before[f"{name}.weight"])
