"""Models that Transformers has split already (`tp_plan="auto"`), trained by an engine and Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

import deepspeed
from deepspeed.base.sharded import full_shape
from deepspeed.checkpoint.foreign.splits import DescribedCuts
from deepspeed.checkpoint.placement import Placement, placement_of
from deepspeed.parallel.tensor.metadata import universal_checkpoint_info
from tests.clients.kit import LENGTH, VOCAB, clean_clients, llama, llama_config, lora
from tests.pool import distributed

pytest.importorskip("transformers", reason="the clients extra is not installed")
pytest.importorskip("accelerate", reason="the clients extra is not installed")
pytest.importorskip("peft", reason="the clients extra is not installed")

STEPS = 3


def plain(kind: str) -> Any:
    """A random tiny model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if kind == "llama":
        return llama(num_attention_heads=4)
    if kind == "tied":
        return llama(num_attention_heads=4, tie_word_embeddings=True)
    sizes: dict[str, Any] = llama_config(num_attention_heads=4).to_dict()
    kept = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    options: dict[str, Any] = {key: sizes[key] for key in kept} | {"head_dim": 4}
    if kind == "qwen3_moe":
        options |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))


def split(kind: str, folder: Path) -> Any:
    """The same model, loaded in parts. Collective."""
    from transformers import AutoModelForCausalLM

    if dist.get_rank() == 0:
        plain(kind).save_pretrained(folder)
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")


def batch(step: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=draw)
    return {"input_ids": ids, "labels": ids}


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": stage,
            "stage3_max_live_parameters": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **more,
    }


def adapted(model: Any) -> Any:
    """With adapters on its column-parallel layers, with the same weights whether these are split or not. (On
    row-parallel ones of a model that Transformers has split, PEFT 0.21's own forward fails.)"""
    made = lora(model, target_modules=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"])
    draw = torch.Generator().manual_seed(5)
    for param in made.parameters():
        if param.requires_grad:
            value = 0.2 * torch.randn(param.shape, generator=draw)
            if isinstance(param, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements).to_local()
            (param.to_local() if isinstance(param, DTensor) else param).data.copy_(value)
    return made


def alone(kind: str, *, adapters: bool = False) -> tuple[list[float], list[float], Any]:
    model = adapted(plain(kind)) if adapters else plain(kind)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(**batch(step)).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model


def train(engine: Any, first: int = 0, last: int = STEPS) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(first, last):
        loss = engine(**batch(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def boxes(placement: Placement) -> tuple[Any, ...]:
    """Return a rank's part of the whole tensor."""
    return placement.boxes or (tuple((0, size) for size in placement.global_shape),)


@distributed(world_size=2)
def test_a_checkpoint_says_how_a_tp_plan_has_split(tmp_path: Path) -> None:
    """Release 0.19's tools read it."""
    with clean_clients():
        engine = deepspeed.initialize(model=split("llama", tmp_path), config=config(1))[0]
        engine.save_checkpoint(tmp_path / "saved", tag="now")
        path = tmp_path / f"saved/now/mp_rank_{dist.get_rank():02d}_model_states.pt"
        info = torch.load(path, weights_only=False)["universal_checkpoint_info"]
        assert info == universal_checkpoint_info(engine.module)
        by_rows = "".join(info["parameter_with_row_parallelism_patterns"])
        assert "o_proj" in by_rows and "down_proj" in by_rows and "q_proj" not in by_rows
        assert "norm" in "".join(info["tp_replicated_parameter_patterns"])
        engine.destroy()


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("llama", 0),
        ("llama", 1),
        ("llama", 2),
        ("llama", 3),
        ("tied", 1),
        ("tied", 3),
        ("qwen3", 0),
        ("qwen3", 2),
    ]
    + [("qwen3", 3), ("qwen3_moe", 1), ("qwen3_moe", 3)],
)
@distributed(world_size=2)
def test_split_models_train_like_whole_ones(kind: str, stage: int, tmp_path: Path) -> None:
    with clean_clients():
        engine = deepspeed.initialize(model=split(kind, tmp_path), config=config(stage))[0]
        assert engine.mesh.size("tp") == 2 and engine.train_batch_size() == 2
        losses, norms = train(engine)
        expected, expected_norms, model = alone(kind)
        assert losses == pytest.approx(expected, rel=1e-5)
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        with torch.no_grad():
            mine, wanted = engine(**batch(9)).logits, model(**batch(9)).logits
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)
        told = DescribedCuts(universal_checkpoint_info(engine.module))
        for name, param in engine.module.named_parameters():
            own, shapes = placement_of(param), [tuple(full_shape(param))] * 2
            if not own.boxes or len(own.boxes[0]) < 3:  # for stacked experts that form has no words
                assert boxes(told.placements(name, shapes)[dist.get_rank()]) == boxes(own), name
        engine.save_16bit_model(tmp_path / "saved")
        if dist.get_rank() == 0:
            saved = torch.load(tmp_path / "saved" / "pytorch_model.bin")
            for name, value in model.state_dict().items():
                torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=2e-5, msg=name)
        engine.destroy()


def _with(feature: str, stage: int, folder: Path) -> dict[str, Any]:
    """The config that goes with a feature."""
    if feature == "bf16":
        return config(stage, bf16={"enabled": True})
    made = config(stage)
    if feature == "offload":
        storage = {"device": "nvme", "nvme_path": str(folder)}
        made["zero_optimization"] |= {"offload_optimizer": storage, "sub_group_size": 500}
        if stage == 3:
            made["zero_optimization"]["offload_param"] = {**storage, "max_in_cpu": 0}
    return made


@pytest.mark.parametrize(
    ("feature", "stage"),
    [("offload", 2), ("offload", 3), ("bf16", 1), ("bf16", 3), ("checkpointing", 0), ("checkpointing", 3)],
)
@distributed(world_size=2)
def test_split_models_with_other_features(feature: str, stage: int, tmp_path: Path) -> None:
    with clean_clients():
        model = split("llama", tmp_path)
        if feature == "checkpointing":
            model.gradient_checkpointing_enable()
            model.config.use_cache = False
        engine = deepspeed.initialize(model=model.train(), config=_with(feature, stage, tmp_path))[0]
        losses, norms = train(engine)
        expected, expected_norms, _ = alone("llama")
        near = 1e-2 if feature == "bf16" else 1e-5
        assert losses == pytest.approx(expected, rel=near)
        assert norms == pytest.approx(expected_norms, rel=4 * near)
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_split_models_with_adapters(stage: int, tmp_path: Path) -> None:
    """PEFT splits them itself."""
    with clean_clients():
        model = adapted(split("llama", tmp_path))
        engine = deepspeed.initialize(model=model.train(), config=config(stage))[0]
        losses, norms = train(engine)
        expected, expected_norms, whole = alone("llama", adapters=True)
        assert losses == pytest.approx(expected, rel=1e-5)
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        for name, param in engine.module.named_parameters():
            wanted = whole.get_parameter(name)
            torch.testing.assert_close(engine.whole_tensor(param), wanted, rtol=1e-4, atol=2e-5, msg=name)
        engine.destroy()


def launched_for(stage: int, feature: str, folder: Path) -> Any:
    """An Accelerator whose ranks share each layer."""
    from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig

    offload: dict[str, Any] = {}
    if feature == "offload":
        offload = {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": str(folder)}
    plugin = DeepSpeedPlugin(
        zero_stage=stage,
        gradient_clipping=1.0,
        zero3_save_16bit_model=True,
        zero3_init_flag=False,
        **offload,
    )
    launched = Accelerator(
        deepspeed_plugin=plugin,
        parallelism_config=ParallelismConfig(tp_size=2),
        mixed_precision="bf16" if feature == "bf16" else "no",
    )
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
    # Accelerate wraps the optimizer before it looks whether that is AdamW: it would become DeepSpeedCPUAdam without
    # decoupled weight decay.
    plugin.deepspeed_config["zero_force_ds_cpu_optimizer"] = False
    return launched


@pytest.mark.parametrize(
    ("stage", "feature"),
    [(0, "checkpointing"), (1, "LoRA"), (2, "offload"), (3, "bf16"), (3, "LoRA"), (3, "")],
)
@distributed(world_size=2)
def test_accelerate_prepares_a_split_model(stage: int, feature: str, tmp_path: Path) -> None:
    with clean_clients():
        model = split("qwen3", tmp_path)  # before: Transformers refuses both at once at stage 3
        expected, _, whole = alone("qwen3", adapters=feature == "LoRA")  # and partitions what is made later
        model = adapted(model) if feature == "LoRA" else model
        if feature == "checkpointing":
            model.gradient_checkpointing_enable()
        launched = launched_for(stage, feature, tmp_path)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
        rows = torch.cat([batch(step)["input_ids"] for step in range(STEPS)])
        data = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=2)
        engine, optimizer, data = launched.prepare(model.train(), optimizer, data)
        losses = []
        for given in data:
            loss = engine(**given).loss
            launched.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses == pytest.approx(expected, rel=1e-2 if feature == "bf16" else 1e-5)
        if feature in ("", "checkpointing", "offload"):
            state = launched.get_state_dict(engine)
            launched.unwrap_model(engine).save_pretrained(tmp_path / "saved", state_dict=state)
        launched.free_memory()
    if (tmp_path / "saved").exists():
        with clean_clients():
            _assert_saved(tmp_path / "saved", whole)


def _assert_saved(folder: Path, whole: Any) -> None:
    """The folder has the whole model, as a stranger would load it."""
    from transformers import AutoModelForCausalLM

    dist.barrier()
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-5, msg=name)
