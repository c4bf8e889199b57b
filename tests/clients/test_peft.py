"""PEFT under ZeRO-3 and below: frozen bases, adapters of other dtypes, saving adapters, AdaLoRA's gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.clients.kit import (
    Tokens,
    assert_same_weights,
    auto_config,
    bf16_without_gpu,
    clean_clients,
    llama,
    lora,
    whole_weights,
)
from tests.clients.test_trainer import arguments, losses, trainer
from tests.pool import distributed

pytest.importorskip("peft", reason="the clients extra is not installed")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_trainer_trains_only_the_adapter(tmp_path: Path, stage: int, precision: str) -> None:
    """The base is frozen and unchanged; checkpoints leave it out; the adapter file loads into a fresh base."""
    from peft import PeftModel

    with clean_clients(), bf16_without_gpu():
        args = arguments(
            tmp_path,
            auto_config(stage),
            bf16=precision == "bf16",
            save_strategy="steps",
            save_steps=4,
            learning_rate=5e-2,
        )
        model = lora(llama())
        before = whole_weights(model)
        run = trainer(args, model)
        run.train()
        assert losses(run)[-1] < losses(run)[0]
        after = whole_weights(model)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained == {name for name in before if "lora_" in name}
        dtype = after["base_model.model.lm_head.weight"].dtype
        for name, value in after.items():
            assert torch.equal(value, before[name].to(value.dtype)) == (name not in trained), name
        assert dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
        run.save_model(str(tmp_path / "adapter"))
        logits = run.model_wrapped(input_ids=Tokens()[0]["input_ids"][None]).logits.detach().float()
        torch.distributed.barrier()
    loaded = PeftModel.from_pretrained(
        llama().to(dtype), str(tmp_path / "adapter"), autocast_adapter_dtype=False
    )
    again = loaded.to(dtype)(input_ids=Tokens()[0]["input_ids"][None]).logits.float()
    assert torch.allclose(logits, again, atol=1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_adapter_checkpoint_resumes_bit_identically(tmp_path: Path, stage: int) -> None:
    def run_to(folder: str, resume: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        with clean_clients():
            args = arguments(
                tmp_path / folder, auto_config(stage), save_strategy="steps", save_steps=2, learning_rate=5e-2
            )
            run = trainer(args, lora(llama()))
            run.train(resume_from_checkpoint=resume)
            return losses(run), whole_weights(run.model)

    straight, weights = run_to("straight", None)
    again, resumed = run_to("resumed", str(tmp_path / "straight" / "checkpoint-2"))
    assert again == straight
    assert_same_weights(weights, resumed)


@distributed(world_size=2)
def test_base_loaded_under_zero_init(tmp_path: Path) -> None:
    """The order of most scripts: arguments first, so that `from_pretrained` partitions; then the adapter, which is
    made whole and takes its shapes from the partitioned base."""
    from transformers import AutoModelForCausalLM

    with clean_clients():
        if torch.distributed.get_rank() == 0:
            llama().save_pretrained(tmp_path / "base")
        torch.distributed.barrier()
        args = arguments(tmp_path, auto_config(3), learning_rate=5e-2)
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        assert all(p.numel() == 0 for p in base.parameters())
        model = lora(base)
        run = trainer(args, model)
        run.train()
        assert losses(run)[-1] < losses(run)[0]
        weights = whole_weights(model)
        assert weights["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"].shape == (
            4,
            16,
        )


@pytest.mark.parametrize("reentrant", [True, False])
@distributed(world_size=2)
def test_gradient_checkpointing_with_a_frozen_base(tmp_path: Path, reentrant: bool) -> None:
    """Both kinds of recomputation work with adapters at stage 3 and change no bit."""

    def weights(checkpointing: bool) -> dict[str, torch.Tensor]:
        with clean_clients():
            config = auto_config(3)
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
            args = arguments(
                tmp_path,
                config,
                gradient_checkpointing=checkpointing,
                gradient_checkpointing_kwargs={"use_reentrant": reentrant} if checkpointing else None,
            )
            model = lora(llama())
            model.enable_input_require_grads()
            run = trainer(args, model)
            run.train()
            return whole_weights(model)

    assert_same_weights(weights(True), weights(False))


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_fp32_adapter_on_a_bf16_base(stage: int) -> None:
    """QLoRA-like: the base frozen in bf16, the adapter trained in fp32, no precision section in the config."""
    import deepspeed

    model = lora(llama().to(torch.bfloat16))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    batch = torch.stack([Tokens()[i]["input_ids"] for i in range(2)])
    measured = []
    for _ in range(5):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        measured.append(loss.item())
    assert measured[-1] < measured[0]
    after = whole_weights(engine)
    for name, value in after.items():
        assert value.dtype == before[name].dtype, name
        assert torch.equal(value, before[name]) == ("lora_" not in name), name


@distributed(world_size=2)
def test_modules_to_save_copies_partitioned_parameters(tmp_path: Path) -> None:
    """`modules_to_save` deep-copies a partitioned module inside a gather."""
    from transformers import AutoModelForCausalLM

    with clean_clients():
        args = arguments(tmp_path, auto_config(3), learning_rate=5e-2)
        if torch.distributed.get_rank() == 0:
            llama().save_pretrained(tmp_path / "base")
        torch.distributed.barrier()
        model = lora(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), modules_to_save=["lm_head"])
        before = whole_weights(model)
        run = trainer(args, model)
        run.train()
        after = whole_weights(model)
        copied = "base_model.model.lm_head.modules_to_save.default.weight"
        original = "base_model.model.lm_head.original_module.weight"
        assert torch.equal(before[copied], before[original])
        assert torch.equal(after[original], before[original]) and not torch.equal(
            after[copied], before[copied]
        )


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_adalora_reads_whole_gradients(tmp_path: Path, stage: int) -> None:
    """AdaLoRA asks `safe_get_full_grad` after backward wherever Transformers knows a DeepSpeed config."""
    from peft import AdaLoraConfig, get_peft_model

    import deepspeed

    with clean_clients():
        keep = arguments(tmp_path, auto_config(stage))  # AdaLoRA asks Transformers whether there is a config
        settings = AdaLoraConfig(
            target_r=2,
            init_r=4,
            tinit=1,
            tfinal=1,
            deltaT=1,
            total_step=4,
            target_modules=["q_proj"],
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(llama(), settings)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 1000},
        }
        engine, *_ = deepspeed.initialize(model=model, config=config)
        batch = torch.stack([Tokens()[i]["input_ids"] for i in range(2)])
        for step in range(3):
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            model.base_model.update_and_allocate(step)
            engine.step()
        scores = model.base_model.rankallocator.exp_avg_ipt
        assert scores and all(torch.isfinite(score).all() for score in scores.values())
        assert any(score.abs().sum() > 0 for score in scores.values())
        del keep


@distributed(world_size=2)
def test_adapters_of_a_split_model_with_reentrant_checkpointing() -> None:
    """The hook by which PEFT lets the embedding's output require gradients stays on the split embedding."""
    from peft import LoraConfig, get_peft_model

    import deepspeed

    with clean_clients():
        model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj", "down_proj"], r=2))
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}
        config |= {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        engine, *_ = deepspeed.initialize(model=model, config=config)
        tokens = torch.arange(10)[None]
        loss = engine(input_ids=tokens, labels=tokens).loss
        assert loss.requires_grad
        engine.backward(loss)
        weights = [param for name, param in engine.module.named_parameters() if "lora_B" in name]
        found = [deepspeed.utils.safe_get_full_grad(param) for param in weights]
        assert found and all(grad is not None and grad.any() for grad in found)
        engine.step()
        with torch.no_grad():
            assert engine(input_ids=tokens, labels=tokens).loss < loss
        engine.destroy()
