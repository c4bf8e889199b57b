"""Causal language models of Transformers cut into stages, without being rewritten: the losses and weights of one
process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.checkpoint.placement import local_part
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.pipe import cut_causal_lm
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.transforms.errors import TransformError
from deepspeed.utils import safe_get_full_fp32_param
from tests.clients.kit import clean_clients
from tests.pool import distributed

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")

TOKENS, LENGTH, MICRO, COUNT = 32, 6, 2, 4
SMALL: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}
LIKE_LLAMA = {**SMALL, "num_key_value_heads": 2}
GPT2 = {"vocab_size": TOKENS, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT = {**SMALL, "ffn_dim": 24, "max_position_embeddings": 16, "word_embed_proj_dim": 16, "dropout": 0.0}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [0, 1]}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", LIKE_LLAMA),
    "gpt2": ("GPT2Config", {**GPT2, **NO_DROPOUT}),  # embedding and head share their weight
    "opt": ("OPTConfig", OPT),
    "bloom": ("BloomConfig", {"vocab_size": TOKENS, "hidden_size": 16, "n_layer": 4, "n_head": 2}),
    "qwen2": ("Qwen2Config", {**LIKE_LLAMA, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {**LIKE_LLAMA, "head_dim": 8, "sliding_window": 4}),
    "gpt_neox": ("GPTNeoXConfig", SMALL),
    "mixtral": ("MixtralConfig", {**LIKE_LLAMA, "num_local_experts": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {**LIKE_LLAMA, **MIXED}),
}


def make(name: str) -> Any:
    kind, settings = ARCHITECTURES[name]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings))
    for key, param in model.named_parameters():
        source = torch.Generator().manual_seed(sum(map(ord, key)))
        param.data += torch.randn(param.shape, generator=source) * 0.1
    return model


def batches(replica: int = 0) -> Iterator[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(replica)
    while True:
        ids = torch.randint(TOKENS, (MICRO, LENGTH), generator=source)
        mask = torch.ones_like(ids)
        mask[0, :2] = 0  # padded on the left
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def engine_of(model: nn.Module, stage: int, stages: int = 2, **more: Any) -> PipelineEngine:
    section, split, experts, sequences = (
        more.pop("pipeline", {}),
        more.pop("tensor_parallel", {}),
        more.pop("experts", 0),
        more.pop("sequences", 1),
    )
    module = cut_causal_lm(model, num_stages=stages, **more)
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": COUNT,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},  # Adam would enlarge the noise of zero gradients
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "pipeline": section,
        "sequence_parallel_size": sequences,
        "tensor_parallel": split,
        "expert_parallel": {"enabled": experts > 0, "autoep_size": max(experts, 1)},
    }
    engine = deepspeed.initialize(model=module, config=config)[0]
    assert isinstance(engine, PipelineEngine)
    return engine


class Plain:
    """The whole model in plain PyTorch."""

    def __init__(self, model: Any) -> None:
        self.model = model.train()
        trained = [param for param in model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.1)
        self.norm = 0.0

    def step(self, data: list[Iterator[dict[str, Tensor]]]) -> float:
        self.optimizer.zero_grad()
        losses = []
        for replica in data:
            for _ in range(COUNT):
                loss = self.model(**next(replica), use_cache=False).loss
                (loss / COUNT / len(data)).backward()
                losses.append(loss.item())
        self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
        self.optimizer.step()
        return sum(losses) / len(losses)


def train_both(engine: PipelineEngine, plain: Plain, steps: int = 2) -> None:
    own = batches(engine.grid.get_data_parallel_id())
    everyone = [batches(replica) for replica in range(engine.dp_world_size)]
    for _ in range(steps):
        expected = plain.step(everyone)
        assert engine.train_batch(own).item() == pytest.approx(expected, rel=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(plain.norm, rel=1e-5)
    theirs = dict(plain.model.named_parameters())
    for name, param in engine.module.named_parameters():
        found = safe_get_full_fp32_param(param)
        expected = local_part(param, theirs[name].detach())
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", ARCHITECTURES)
@distributed(world_size=2)
def test_architectures(name: str) -> None:
    with clean_clients():
        engine, plain = engine_of(make(name), stage=1), Plain(make(name))
        whole = sum(p.numel() for p in plain.model.parameters())
        assert sum(p.numel() for p in engine.module.parameters()) < 0.75 * whole
        train_both(engine, plain)
        engine.destroy()


CHOICES: list[tuple[int, dict[str, Any]]] = [
    (0, {"pipeline": {"schedule": "zero-bubble"}}),
    (2, {"chunks": 2, "pipeline": {"schedule": "interleaved"}}),
    (1, {"chunks": 2, "zigzag": True, "pipeline": {"schedule": "zero-bubble-v"}}),
    (3, {}),
]


@pytest.mark.parametrize(("stage", "more"), CHOICES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@distributed(world_size=2)
def test_orders_and_zero_stages(name: str, stage: int, more: dict[str, Any]) -> None:
    with clean_clients():
        engine = engine_of(make(name), stage, **more)
        train_both(engine, Plain(make(name)))
        engine.destroy()


@pytest.mark.parametrize(
    ("name", "stage", "more"), [("llama", 0, {}), ("gpt2", 1, {}), ("qwen2", 3, {"chunks": 2})]
)
@distributed(world_size=4)
def test_stages_that_share_sequences(name: str, stage: int, more: dict[str, Any]) -> None:
    """PP 2 x SP 2: whole sequences in, the loss of one process out; padding is on the first shard."""
    with clean_clients():
        engine = engine_of(make(name), stage, sequences=2, **more)
        assert (engine.dp_world_size, engine.seq_dp_world_size) == (1, 2)
        plain = Plain(make(name))
        train_both(engine, plain)
        data = [next(batches(7)) for _ in range(COUNT)]
        with torch.no_grad():
            expected = sum(plain.model(**each, use_cache=False).loss.item() for each in data) / COUNT
        assert engine.eval_batch(iter(data)).item() == pytest.approx(expected, rel=1e-5)
        engine.destroy()


@distributed(world_size=4)
def test_replicas_and_checkpoints(tmp_path: Path) -> None:
    """Two stages of two replicas; a checkpoint has the model's own names, and loads into the plain model."""
    with clean_clients():
        engine, plain = engine_of(make("gpt2"), stage=1), Plain(make("gpt2"))
        train_both(engine, plain)
        engine.save_checkpoint(tmp_path)
        dist.barrier()
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
        loaded = make("gpt2")
        missing, unexpected = loaded.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        for (name, one), two in zip(loaded.named_parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        pairs = [next(batches(5)) for _ in range(COUNT)]
        with torch.no_grad():
            losses = [plain.model.eval()(**pair, use_cache=False).loss for pair in pairs]
        found = engine.eval_batch(iter(pairs))
        torch.testing.assert_close(found, torch.stack(losses).mean(), rtol=1e-4, atol=1e-4)
        engine.destroy()
        again = engine_of(make("gpt2"), stage=2, stages=4)
        folder, _ = again.load_checkpoint(tmp_path)
        assert folder is not None
        torch.testing.assert_close(again.eval_batch(iter(pairs)), found, rtol=1e-5, atol=1e-5)
        again.destroy()


# Layers that several ranks share -----------------------------------------------------------------------------------


SPLIT = [("llama", 1), ("gpt2", 0), ("qwen2", 3), ("gpt_neox", 2)]  # gpt2 and qwen2 tie embedding and head


@pytest.mark.parametrize(("name", "stage"), SPLIT)
@distributed(world_size=4)
def test_two_stages_of_two_parts(name: str, stage: int, tmp_path: Path) -> None:
    """PP 2 x TP 2 by the config alone; its checkpoint is that of the whole model, and resumes with other axes."""
    with clean_clients():
        engine, plain = engine_of(make(name), stage, tensor_parallel={"autotp_size": 2}), Plain(make(name))
        assert (engine.num_stages, engine.mp_world_size, engine.dp_world_size) == (2, 2, 1)
        whole = sum(p.numel() for p in plain.model.parameters())
        assert sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()) < 0.45 * whole
        own, same = batches(), batches()
        for _ in range(2):
            expected = plain.step([same])
            assert engine.train_batch(own).item() == pytest.approx(expected, rel=1e-5)
            assert engine.get_global_grad_norm() == pytest.approx(plain.norm, rel=1e-5)
        pairs = [next(batches(5)) for _ in range(COUNT)]
        found = engine.eval_batch(iter(pairs)).item()
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        dist.barrier()
        again = engine_of(make(name), stage=1)  # two replicas of whole layers
        folder, _ = again.load_checkpoint(tmp_path)
        assert folder is not None
        assert again.eval_batch(iter(pairs)).item() == pytest.approx(found, rel=1e-5)
        theirs = dict(plain.model.named_parameters())
        for key, param in again.module.named_parameters():
            torch.testing.assert_close(
                param, theirs[key], rtol=1e-5, atol=1e-6, msg=lambda m, n=key: f"{n}: {m}"
            )
        again.destroy()


# Adapters -----------------------------------------------------------------------------------------------------------


def with_adapters(name: str, **more: Any) -> Any:
    """A model of PEFT: everything but the adapters is frozen."""
    peft = pytest.importorskip("peft", reason="the clients extra is not installed")
    targets = ["q_proj", "v_proj", "down_proj"] if name == "llama" else ["c_attn"]
    settings = {"r": 2, "lora_alpha": 4, "target_modules": targets, "fan_in_fan_out": name == "gpt2"}
    torch.manual_seed(5)
    model = peft.get_peft_model(make(name), peft.LoraConfig(task_type="CAUSAL_LM", **settings, **more))
    for key, param in model.named_parameters():
        if param.requires_grad:  # the second factor begins with zeros
            source = torch.Generator().manual_seed(sum(map(ord, key)))
            param.data = torch.randn(param.shape, generator=source) * 0.1
    return model


def train_adapters(engine: PipelineEngine, plain: Plain, steps: int = 2) -> None:
    own = batches(engine.grid.get_data_parallel_id())
    everyone = [batches(replica) for replica in range(engine.dp_world_size)]
    for _ in range(steps):
        expected = plain.step(everyone)
        assert engine.train_batch(own).item() == pytest.approx(expected, rel=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(plain.norm, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "stage", "schedule"),
    [("llama", 0, "1f1b"), ("llama", 1, "zero-bubble"), ("llama", 3, "1f1b"), ("gpt2", 2, "1f1b")],
)
@distributed(world_size=2)
def test_adapters(name: str, stage: int, schedule: str, tmp_path: Path) -> None:
    with clean_clients():
        engine = engine_of(with_adapters(name), stage, pipeline={"schedule": schedule})
        plain = Plain(with_adapters(name))
        before = {key: p.detach().clone() for key, p in plain.model.named_parameters()}
        reduced = engine._require_core("").reducer.params
        names = {id(p): key for key, p in engine.module.named_parameters()}
        assert reduced and all("lora_" in names[id(p)] for p in reduced)
        train_adapters(engine, plain)
        theirs = dict(plain.model.named_parameters())
        for key, param in engine.module.named_parameters():
            if param.requires_grad:
                torch.testing.assert_close(safe_get_full_fp32_param(param), theirs[key], rtol=1e-5, atol=1e-6)
                assert not torch.equal(theirs[key], before[key])
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        pairs = [next(batches(5)) for _ in range(COUNT)]
        found = engine.eval_batch(iter(pairs)).item()
        again = engine_of(with_adapters(name), stage=1)
        again.load_checkpoint(tmp_path, load_module_strict=False)
        assert again.eval_batch(iter(pairs)).item() == pytest.approx(found, rel=1e-5)
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
        assert set(weights) == {key for key, p in theirs.items() if p.requires_grad}
        for key, value in weights.items():
            torch.testing.assert_close(value, theirs[key], rtol=1e-5, atol=1e-6)
        engine.destroy()
        again.destroy()


@distributed(world_size=4)
def test_adapters_over_stages_and_parts_or_replicas() -> None:
    with clean_clients():
        for more in ({}, {"tensor_parallel": {"autotp_size": 2}}):
            engine = engine_of(with_adapters("llama"), stage=1, **more)
            train_adapters(engine, Plain(with_adapters("llama")))
            engine.destroy()


@pytest.mark.parametrize(("name", "stage"), [("mixtral", 0), ("mixtral", 3), ("qwen3_moe", 1)])
@distributed(world_size=4)
def test_experts_shared_by_replicas(name: str, stage: int) -> None:
    """Two stages of two replicas; of the last model the first stage has no experts."""
    with clean_clients():
        engine = engine_of(make(name), stage, experts=2, partition_method="uniform")
        train_both(engine, Plain(make(name)))
        engine.destroy()


@distributed(world_size=2)
def test_experts_that_no_stage_has() -> None:
    with clean_clients(), pytest.raises(TransformError, match="no experts with stacked weights"):
        engine_of(make("llama"), 0, experts=1)


@distributed(world_size=2)
def test_checkpointed_blocks() -> None:
    with clean_clients():
        model = make("llama")
        model.gradient_checkpointing_enable()
        engine = engine_of(model, stage=0)
        train_both(engine, Plain(make("llama")))
        with pytest.raises(ValueError, match="gradient_checkpointing_enable"):
            engine.stage_module.set_checkpoint_interval(1)
        engine.destroy()


@distributed(world_size=2)
def test_what_cannot_be_cut() -> None:
    with clean_clients():
        routed = make("mixtral")
        routed.config.output_router_logits = True
        with pytest.raises(PipelineError, match="output_router_logits"):
            cut_causal_lm(routed, num_stages=2)
        with torch.device("meta"):
            empty = make("llama")
        with pytest.raises(PipelineError, match="has no values"):
            cut_causal_lm(empty, num_stages=2)
