"""Folders as the hub has them, loaded every way: the logits are those of `from_pretrained`.

`save_pretrained` writes the hub's layout: one tensor per expert where the model has one per layer, and the names of
the released files, such as GPT-NeoX's `embed_out`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.inference.v2.config_v2 import RaggedInferenceEngineConfig
from deepspeed.inference.v2.engine_factory import HuggingFaceCheckpointEngine, build_hf_engine
from deepspeed.inference.v2.policy import InferenceV2Policy
from deepspeed.parallel.pipeline.causal_lm import cut_causal_lm
from deepspeed.tools import hf_to_universal
from tests.pool import distributed

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")

from tests.clients.architectures import ARCHITECTURES, CAUSAL, Architecture, make  # noqa: E402
from tests.clients.kit import clean_clients  # noqa: E402

_MORE = {
    "phimoe": Architecture(
        "PhimoeConfig", {**ARCHITECTURES["mixtral"].settings, "num_experts_per_tok": 2}, "experts"
    ),
    "olmoe": Architecture(
        "OlmoeConfig",
        {**ARCHITECTURES["llama"].settings, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
        "experts",
    ),
}
NAMES = [name for name, each in ARCHITECTURES.items() if each.auto == CAUSAL] + list(_MORE)
IN_FILES = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w2.weight",
    "phimoe": "model.layers.1.block_sparse_moe.experts.3.w2.weight",
    "olmoe": "model.layers.1.mlp.experts.3.down_proj.weight",
    "qwen2_moe": "model.layers.1.mlp.experts.3.down_proj.weight",
    "qwen3_moe": "model.layers.1.mlp.experts.3.down_proj.weight",
    "deepseek_v3": "model.layers.1.mlp.experts.3.down_proj.weight",
    "gpt_neox": "embed_out.weight",
}
"""Of the architectures whose files differ from the model, a tensor that only the files have."""
STACKED = ("mixtral", "deepseek_v3", "gpt_neox")
IDS = torch.arange(5, 13)[None]


@pytest.fixture(autouse=True)
def _tables() -> Any:
    ARCHITECTURES.update(_MORE)
    yield
    for name in _MORE:
        ARCHITECTURES.pop(name, None)


def saved(name: str, folder: Path, **how: Any) -> Any:
    """The config of the model that is in ``folder`` then, in the hub's layout."""
    ARCHITECTURES.update(_MORE)
    model: Any = make(name).eval()
    model.save_pretrained(folder, **how)
    names = {key for file in folder.glob("*.safetensors") for key in safe_open(file, "pt").keys()}  # noqa: SIM118
    only = IN_FILES.get(name)
    assert only is None or (only in names and only not in model.state_dict())
    return model.config


def empty(config: Any, context: Any = None) -> nn.Module:
    with context or deepspeed.OnDevice(dtype=torch.float32, device="meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits.clone()


def expected(folder: Path) -> Tensor:
    return logits_of(transformers.AutoModelForCausalLM.from_pretrained(folder).eval())


def training(config: Any, stage: int, folder: Path, **more: Any) -> Tensor:
    """Logits of a training engine whose model has got other weights and then those of ``folder``."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
        **more,
    }
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    assert engine.load_checkpoint(str(folder))[0] is not None
    logits = logits_of(engine.eval())
    engine.destroy()
    return logits


@pytest.mark.parametrize("name", NAMES)
def test_folders_of_the_hub_are_loaded_every_way(name: str, tmp_path: Path) -> None:
    config = saved(name, tmp_path / "hub")
    folder = str(tmp_path / "hub")
    wanted = expected(tmp_path / "hub")
    for context in (None, torch.device("meta")):
        engine = deepspeed.init_inference(empty(config, context), dtype="fp32", checkpoint=folder)
        assert torch.equal(logits_of(engine), wanted)
    assert torch.equal(
        logits_of(InferenceV2Policy(HuggingFaceCheckpointEngine(folder)).build_model()), wanted
    )
    universal = hf_to_universal.convert(folder, tmp_path / "universal")
    names = {each.name for each in (universal / "zero").iterdir()}
    assert names <= set(empty(config).state_dict())


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["mixtral", "qwen2_moe", "gpt_neox"], id="some"),
        pytest.param(NAMES, id="all", marks=pytest.mark.slow),
    ],
)
@distributed(world_size=1)
def test_training_engines_load_folders_of_the_hub(names: list[str], tmp_path: Path) -> None:
    with clean_clients(deepspeed_state=False):
        for name in names:
            config = saved(name, tmp_path / name)
            assert torch.equal(training(config, 1, tmp_path / name), expected(tmp_path / name)), name


@pytest.mark.parametrize("name", STACKED)
@distributed(world_size=2)
def test_sharded_models_load_folders_of_the_hub(name: str, tmp_path: Path) -> None:
    """Directly, from several files, and over a universal checkpoint."""
    with clean_clients(deepspeed_state=False):
        if torch.distributed.get_rank() == 0:
            saved(name, tmp_path / "hub", max_shard_size="20KB")
            hf_to_universal.convert(tmp_path / "hub", tmp_path / "universal")
        torch.distributed.barrier()
        config = transformers.AutoConfig.from_pretrained(tmp_path / "hub")
        wanted = expected(tmp_path / "hub")
        assert torch.equal(training(config, 3, tmp_path / "hub"), wanted)
        more = {"checkpoint": {"load_universal": True}}
        assert torch.equal(training(config, 3, tmp_path / "universal", **more), wanted)


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox"])
@distributed(world_size=2)
def test_stages_load_folders_of_the_hub(name: str, tmp_path: Path) -> None:
    with clean_clients(deepspeed_state=False):
        if torch.distributed.get_rank() == 0:
            saved(name, tmp_path)
        torch.distributed.barrier()
        whole: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        module = cut_causal_lm(transformers.AutoModelForCausalLM.from_config(whole.config), num_stages=2)
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
        engine: Any = deepspeed.initialize(model=module, config=config)[0]
        assert engine.load_checkpoint(str(tmp_path))[0] is not None
        batch = {"input_ids": IDS, "labels": IDS}
        with torch.no_grad():
            torch.testing.assert_close(engine.eval_batch(iter([batch])), whole(**batch).loss)
        engine.destroy()


@pytest.mark.parametrize("name", STACKED)
@distributed(world_size=2)
def test_ranks_and_stores_load_folders_of_the_hub(name: str, tmp_path: Path) -> None:
    """Layers or experts shared by ranks, weights in a file, and integers."""
    with clean_clients(deepspeed_state=False):
        if torch.distributed.get_rank() == 0:
            saved(name, tmp_path / "hub")
        torch.distributed.barrier()
        config = transformers.AutoConfig.from_pretrained(tmp_path / "hub")
        wanted, folder = expected(tmp_path / "hub"), str(tmp_path / "hub")
        ways: list[dict[str, Any]] = [{"mp_size": 2}]
        if name != "gpt_neox":
            ways.append({"moe": {"ep_size": 2}})
        offload = {"device": "nvme", "nvme_path": str(tmp_path)}
        ways.append(
            {"zero": {"stage": 3, "offload_param": offload, "stage3_param_persistence_threshold": 1000}}
        )
        for way in ways:
            engine = deepspeed.init_inference(empty(config), dtype="fp32", checkpoint=folder, **way)
            torch.testing.assert_close(logits_of(engine), wanted, rtol=1e-4, atol=1e-4)
        engine = deepspeed.init_inference(empty(config), dtype="int8", checkpoint=folder)
        assert (logits_of(engine).float() - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize("name", STACKED)
def test_fastgen_runs_folders_of_the_hub(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    engine = build_hf_engine(str(tmp_path), RaggedInferenceEngineConfig())
    found = engine.put([0], [IDS[0]])
    torch.testing.assert_close(found[0], expected(tmp_path)[0, -1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_tied_weights_may_be_under_the_name_of_the_head_only(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model: Any = make(name, tie_word_embeddings=True).eval()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    inside = "gpt_neox.embed_in.weight" if name == "gpt_neox" else "transformer.wte.weight"
    weights["embed_out.weight" if name == "gpt_neox" else "lm_head.weight"] = weights.pop(inside)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    engine = deepspeed.init_inference(empty(model.config), dtype="fp32", checkpoint=str(tmp_path))
    assert torch.equal(logits_of(engine), logits_of(model))


def test_weights_in_unknown_layouts_are_refused(tmp_path: Path) -> None:
    config = saved("llama", tmp_path)
    config.quantization_config = {"quant_method": "aqlm"}
    with pytest.raises(DeepSpeedConfigError, match=r"quantization_config.*aqlm.*from_pretrained"):
        deepspeed.init_inference(empty(config), dtype="fp32", checkpoint=str(tmp_path))


def test_bool_is_a_dtype_of_factories() -> None:
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        made = [torch.ones(2, dtype=kind) for kind in (bool, float, int)]  # type: ignore[call-overload]
    assert [each.dtype for each in made] == [torch.bool, torch.bfloat16, torch.int64]
    assert all(each.is_meta for each in made)
