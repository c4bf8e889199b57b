"""The hybrid engine: rollouts between training steps, at every kind of sharding, with and without adapters."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from tests.clients.kit import clean_clients
from tests.pool import distributed

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")
peft = pytest.importorskip("peft", reason="the clients extra is not installed")

from tests.clients.architectures import make  # noqa: E402


def config(stage: int, **section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
        },
        "hybrid_engine": {"enabled": True, **section},
    }


def adapted() -> Any:
    torch.manual_seed(1)
    model = peft.get_peft_model(make("llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, param in model.named_parameters():
        if "lora_B" in name:  # they begin at zero
            torch.nn.init.normal_(param, 0, 0.3)
    return model


def engine_of(model: Any, stage: int, **section: Any) -> Any:
    params = [param for param in model.parameters() if param.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=params, config=config(stage, **section))[0]


def prompt(rank: int) -> Tensor:
    return torch.randint(3, 90, (2, 5 + rank), generator=torch.Generator().manual_seed(rank))


def settings(rank: int = 0) -> Any:
    return transformers.GenerationConfig(max_new_tokens=4 + 3 * rank, do_sample=False, pad_token_id=0)


def train(engine: Any, rank: int) -> None:
    tokens = prompt(rank)
    engine.train()
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


def check_rollouts(kind: str, stage: int) -> None:
    """Each rank has its own prompt and length, synced or not, by the engine or its module."""
    rank = torch.distributed.get_rank()
    make_model = adapted if kind == "adapted" else lambda: make("llama")
    plain, undisturbed = engine_of(make_model(), stage), engine_of(make_model(), stage)
    for step in range(2):
        train(plain, rank)
        train(undisturbed, rank)
        with deepspeed.zero.GatheredParameters(list(undisturbed.module.parameters())):
            state = {name: each.detach().clone() for name, each in undisturbed.module.state_dict().items()}
        alone = make_model()
        alone.load_state_dict(state)
        wanted = alone.eval().generate(input_ids=prompt(rank), generation_config=settings(rank))
        plain.eval()
        generate = plain.generate if step else plain.module.generate
        found = generate(input_ids=prompt(rank), generation_config=settings(rank), synced_gpus=True)
        assert torch.equal(found, wanted)
        assert not plain.adapters.fused and len(plain.adapters) == (4 if kind == "adapted" else 0)
        with torch.no_grad():  # log-probabilities are those of training
            torch.testing.assert_close(plain(input_ids=found).logits, alone(input_ids=found).logits)
    for engine in (plain, undisturbed):
        train(engine, rank)
    everything = [list(each.module.parameters()) for each in (plain, undisturbed)]
    with deepspeed.zero.GatheredParameters(everything[0] + everything[1]):
        for one, other in zip(*everything, strict=True):
            assert torch.equal(one, other)


@distributed(world_size=2)
def test_rollouts_between_steps_at_stage_3() -> None:
    with clean_clients(deepspeed_state=False):
        check_rollouts("plain", 3)


@distributed(world_size=2)
def test_rollouts_with_adapters() -> None:
    with clean_clients(deepspeed_state=False):
        check_rollouts("adapted", 2)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stage"), [("plain", 0), ("plain", 1), ("adapted", 3), ("adapted", 0)])
@distributed(world_size=2)
def test_rollouts_at_other_stages(kind: str, stage: int) -> None:
    with clean_clients(deepspeed_state=False):
        check_rollouts(kind, stage)


@distributed(world_size=2)
def test_all_weights_stay_whole_from_the_first_token_to_the_last() -> None:
    with clean_clients(deepspeed_state=False):
        engine = engine_of(make("llama"), 3)
        engine.eval()
        params, whole = list(engine.module.parameters()), []

        def look(*_: Any) -> None:
            whole.append(all(param.shape == param.ds_shape for param in params))

        engine.module.lm_head.register_forward_hook(look)
        engine.generate(input_ids=prompt(0), generation_config=settings())
        assert whole == [True] * 4
        assert all(param.numel() == 0 for param in params)


class LiveBytes(transformers.LogitsProcessor):
    """Of all tensors, at each token."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(self.count())
        return scores

    @staticmethod
    def count() -> int:
        gc.collect()
        found = {}
        for each in gc.get_objects():
            if type(each) in (Tensor, torch.nn.Parameter):
                storage = each.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        return sum(found.values())


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_bytes_of_weights_while_generating(stage: int) -> None:
    """No second copy: nothing at stages 0 to 2; at stage 3 the gathered weights, until the last token."""
    with clean_clients(deepspeed_state=False):
        shape = {"hidden_size": 256, "intermediate_size": 8192, "num_hidden_layers": 2, "vocab_size": 128}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=4, **shape))
        weights = sum(param.nbytes for param in model.parameters())
        engine = engine_of(model, stage)
        train(engine, dist.get_rank())
        engine.eval()
        engine.generate(input_ids=prompt(0), generation_config=settings())  # finds out about the module
        live = LiveBytes()
        before = live.count()
        engine.generate(input_ids=prompt(0), generation_config=settings(), logits_processor=[live])
        expected = weights if stage == 3 else 0
        for during in live.seen:
            assert abs(during - before - expected) < 0.2 * weights  # the cache, and what a forward needs
        assert len(live.seen) == 4 and abs(live.count() - before) < 0.02 * weights
        engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 3])
def test_adapters_are_fused_by_hand_where_weights_are_whole(stage: int) -> None:
    with clean_clients(deepspeed_state=False):
        engine = engine_of(adapted(), stage)
        layer = next(each for each in engine.module.modules() if hasattr(each, "lora_A"))
        tokens = prompt(dist.get_rank())
        expected = engine(input_ids=tokens).logits
        if stage == 3:
            with pytest.raises(RuntimeError, match=r"GatheredParameters\(engine\.module\.parameters\(\)\)"):
                engine.fuse_lora_weight()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
            before = layer.base_layer.weight.clone()
            engine.fuse_lora_weight()
            assert layer.merged and not torch.equal(layer.base_layer.weight, before)
            torch.testing.assert_close(engine.module(input_ids=tokens).logits, expected)
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
            engine.unfuse_lora_weight()
            assert not layer.merged and torch.equal(layer.base_layer.weight, before)
        engine.destroy()


@distributed(world_size=1)
def test_what_is_refused_and_what_copies_do() -> None:
    with clean_clients(deepspeed_state=False):
        engine = engine_of(make("llama"), 0, max_out_tokens=6)
        assert type(engine) is deepspeed.DeepSpeedHybridEngine
        engine.eval()
        wanted = engine.generate(input_ids=prompt(0), generation_config=settings())
        with pytest.raises(RuntimeError, match="7 tokens is longer than max_out_tokens=6"):
            engine.generate(input_ids=prompt(2), generation_config=settings())
        copied = copy.deepcopy(engine.module)
        assert torch.equal(copied.generate(input_ids=prompt(0), generation_config=settings()), wanted)
        copied.generate(input_ids=prompt(2), generation_config=settings())  # the limit is the engine's
        engine.fuse_lora_weight()
        engine.unfuse_lora_weight()
        engine.retake_inference_cache()
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=r"Linear has no generate"):
            deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config(0))
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=r"inference_tp_size=2 with 1 ranks"):
            engine_of(make("llama"), 0, inference_tp_size=2)


def check_shared_generation(kind: str, stage: int, **section: Any) -> None:
    """Two ranks share each layer during generation, with different prompts, and train with whole layers."""
    rank = torch.distributed.get_rank()
    make_model = adapted if kind == "adapted" else lambda: make(kind)
    shared = engine_of(make_model(), stage, inference_tp_size=2, **section)
    alone = engine_of(make_model(), stage)
    lasting = transformers.GenerationConfig(
        max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=list(range(0, 90, 7))
    )
    mask = torch.ones_like(prompt(rank))
    mask[1, :2] = 0
    for _ in range(2):
        for engine in (shared, alone):
            train(engine, rank)
            engine.eval()
        wanted = alone.generate(input_ids=prompt(rank), attention_mask=mask, generation_config=lasting)
        found = shared.generate(prompt(rank), attention_mask=mask, generation_config=lasting)
        assert torch.equal(found, wanted)
    several = shared.module.generate(prompt(rank), generation_config=settings(), num_beams=2)
    assert torch.equal(several, alone.generate(prompt(rank), generation_config=settings(), num_beams=2))
    with deepspeed.zero.GatheredParameters([*shared.module.parameters(), *alone.module.parameters()]):
        for one, other in zip(shared.module.parameters(), alone.module.parameters(), strict=True):
            assert torch.equal(one, other)
    held = sum(each.numel() for each in shared._split_copy.module.parameters())
    whole = sum(getattr(each, "ds_numel", each.numel()) for each in shared.module.parameters())
    assert held <= 0.55 * whole and (held > 0) == section.get("pin_parameters", True)
    with pytest.raises(ValueError, match="leave out return_dict_in_generate"):
        shared.generate(prompt(rank), generation_config=settings(), return_dict_in_generate=True)
    with pytest.raises(ValueError, match="but got position_ids"):
        shared.generate(prompt(rank), position_ids=prompt(rank))


@pytest.mark.parametrize(
    ("kind", "stage", "section"),
    [
        ("llama", 3, {"tp_gather_partition_size": 1, "pin_parameters": False}),
        ("adapted", 2, {"release_inference_cache": True}),
        pytest.param("gpt2", 0, {}, marks=pytest.mark.slow),
        pytest.param("adapted", 3, {}, marks=pytest.mark.slow),
    ],
)
@distributed(world_size=2)
def test_layers_are_shared_only_while_generating(kind: str, stage: int, section: dict[str, Any]) -> None:
    with clean_clients(deepspeed_state=False):
        check_shared_generation(kind, stage, **section)
