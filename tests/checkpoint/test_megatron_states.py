"""State dicts of Megatron models for another number of tensor-parallel ranks, against cuts of one whole model."""

from __future__ import annotations

import json

import pytest
import torch

from deepspeed.checkpoint.foreign.megatron import MegatronSDLoader, SDLoaderFactory
from tests.pool import distributed

HEADS, ROWS, WIDTH = 4, 3, 12


def whole() -> dict[str, torch.Tensor]:
    """Two layers; of the fused weight the rows say what they are: [part, head, row]."""
    fused = torch.arange(3 * HEADS * ROWS).reshape(3, HEADS, ROWS)
    model = {
        "word_embeddings.weight": torch.randn(16, WIDTH),
        "position_embeddings.weight": torch.randn(8, WIDTH),
    }
    for layer in range(2):
        prefix = f"layers.{layer}."
        model |= {
            prefix + "input_layernorm.weight": torch.randn(WIDTH),
            prefix + "attention.query_key_value.weight": fused,
            prefix + "attention.query_key_value.bias": fused + 100,
            prefix + "attention.dense.weight": torch.randn(WIDTH, HEADS * ROWS),
            prefix + "attention.dense.bias": torch.randn(WIDTH),
            prefix + "mlp.dense_h_to_4h.weight": torch.randn(8, WIDTH),
            prefix + "mlp.dense_h_to_4h.bias": torch.randn(8),
            prefix + "mlp.dense_4h_to_h.weight": torch.randn(WIDTH, 8),
        }
    return model


def part(model: dict[str, torch.Tensor], rank: int, ranks: int, version: float) -> dict[str, torch.Tensor]:
    """Return one rank's part, by Megatron's rules for each checkpoint version."""
    found = {}
    for name, value in model.items():
        if "query_key_value" in name:
            heads = value.chunk(ranks, dim=1)[rank]  # [part, head, row]
            order = {0: (0, 1, 2), 1.0: (1, 2, 0), 2.0: (1, 0, 2)}[version]
            value = heads.permute(order).reshape(-1)
        elif "dense.weight" in name or "4h_to_h.weight" in name:
            value = value.chunk(ranks, dim=1)[rank]
        elif "h_to_4h" in name or "word" in name:
            value = value.chunk(ranks, dim=0)[rank]
        found[name] = value.clone()
    return found


def saved(tmp_path, model, ranks: int, version: float, key: str | None = "module") -> list[str]:
    paths = []
    for rank in range(ranks):
        state = part(model, rank, ranks, version)
        paths.append(str(tmp_path / f"mp_rank_{rank:02d}_model_states.pt"))
        torch.save(
            state if key is None else {key: state, "checkpoint_version": version, "step": 7}, paths[-1]
        )
    return paths


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
@pytest.mark.parametrize("before, after", [(4, 2), (4, 1), (1, 4), (2, 4), (2, 2)])
def test_each_rank_gets_its_part_of_the_whole(tmp_path, before, after, version):
    model = whole()
    loader = SDLoaderFactory.get_sd_loader(saved(tmp_path, model, before, version), checkpoint_engine=None)
    assert isinstance(loader, MegatronSDLoader)
    for rank in range(after):
        path, state, (scales, merged) = loader.load(after, rank)
        assert path == loader.ckpt_list[rank * before // after]
        assert (scales, merged, state["step"]) == (None, max(before // after, 1), 7)
        assert_same(state["module"], part(model, rank, after, version))


def test_a_description_names_the_files_and_the_version(tmp_path):
    model = whole()
    described = {
        "type": "Megatron",
        "version": 2.0,
        "checkpoints": saved(tmp_path, model, 2, 2.0, key="model"),
    }
    (tmp_path / "description.json").write_text(json.dumps(described))
    loader = SDLoaderFactory.get_sd_loader_json(str(tmp_path / "description.json"), None)
    assert_same(loader.load(1, 0)[1]["model"], part(model, 0, 1, 2.0))
    as_it_is = {"type": "ds_model", "checkpoints": [], "version": 1}
    assert SDLoaderFactory.get_sd_loader_json(as_it_is, None) is as_it_is


def test_files_of_single_layers_hold_nothing_else(tmp_path):
    model = whole()
    loader = SDLoaderFactory.get_sd_loader(saved(tmp_path, model, 2, 0, key=None), None, version=0)
    assert_same(loader.load(4, 3, module_key=None, is_pipe_parallel=True)[1], part(model, 3, 4, 0))


def test_what_does_not_fit_is_named(tmp_path):
    paths = saved(tmp_path, whole(), 2, 2.0)
    loader = SDLoaderFactory.get_sd_loader(paths, None)
    for ranks, words in ((3, "not a multiple"), (0, "mp_rank=0")):
        with pytest.raises(ValueError, match=words):
            loader.load(ranks, 0)
    with pytest.raises(ValueError, match="quantize=True"):
        loader.load(2, 0, quantize=True)
    with pytest.raises(ValueError, match="'module' or 'model'"):
        loader.get_module({})
    with pytest.raises(ValueError, match="version 3"):
        SDLoaderFactory.get_sd_loader(paths, None, version=3).load(1, 0)
    with pytest.raises(ValueError, match="ckpt_list is empty"):
        SDLoaderFactory.get_sd_loader([], None)
    with pytest.raises(ValueError, match="sd_type='other'"):
        SDLoaderFactory.get_sd_loader(paths, None, "other")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        SDLoaderFactory.get_sd_loader([str(tmp_path / "nowhere")], None)


@distributed(world_size=2)
def test_clients_find_the_files_of_an_engine_by_its_names(tmp_path):
    import deepspeed

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Embedding(6, 4))
    for stage in (0, 2, 3):
        config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": stage}}
        config["sparse_gradients"] = stage == 0
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
        assert engine.sparse_tensor_module_names == ({"1.weight"} if stage == 0 else set())
        engine.save_checkpoint(str(tmp_path), tag=f"stage{stage}")
        files = engine._get_all_ckpt_names(str(tmp_path), f"stage{stage}")
        assert files == [engine._get_ckpt_name(str(tmp_path), f"stage{stage}")]
        where = (str(tmp_path), f"stage{stage}")
        for path in (engine._get_zero_ckpt_name(*where), engine._get_optimizer_ckpt_name(*where, 0)):
            torch.load(path, weights_only=True)
        loader = SDLoaderFactory.get_sd_loader(files, checkpoint_engine=engine.checkpoint_engine)
        path, state, _ = loader.load(engine.mp_world_size, 0)
        assert path == files[0] and state["dp_world_size"] == 2
        assert state["sparse_tensor_module_names"] == (["1.weight"] if stage == 0 else [])
        assert set(state["module"]) == {"0.weight", "0.bias", "1.weight"}
        engine.destroy()


@distributed(world_size=1)
def test_class_of_wrapped_clients_optimizers():
    import deepspeed
    from deepspeed.compat.fp16.fused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.zero.optimizer import BF16_Optimizer

    for dtype, kind in (
        (None, FP16_UnfusedOptimizer),
        ("bf16", FP16_UnfusedOptimizer),
        ("fp32", BF16_Optimizer),
    ):
        model = torch.nn.Linear(3, 2)
        engine, optimizer, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            config={
                "train_batch_size": 1,
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": dtype},
            },
        )
        assert isinstance(optimizer, kind) and optimizer.low_precision_dtype is torch.bfloat16
        engine.backward(engine(torch.ones(1, 3)).sum())
        assert (model.weight.grad is None) == (dtype == "fp32")
        engine.step()
        assert model.weight.grad is None


@distributed(world_size=1)
def test_class_of_stage_1_with_bf16_weights_and_sums_in_fp32():
    import deepspeed
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    sums, offload = {"grad_accum_dtype": "fp32"}, {"offload_optimizer": {"device": "cpu"}}
    for stage, types, zero, expected in (
        (1, sums, {}, True),
        (1, {}, {}, False),
        (2, sums, {}, False),
        (1, sums, offload, False),
    ):
        engine, optimizer, *_ = deepspeed.initialize(
            model=torch.nn.Linear(3, 2),
            config={
                "train_batch_size": 1,
                "optimizer": {"type": "Adam"},
                "bf16": {"enabled": True},
                "data_types": types,
                "zero_optimization": {"stage": stage, **zero},
            },
        )
        assert isinstance(optimizer, BF16_Optimizer) == expected and isinstance(
            optimizer, DeepSpeedZeroOptimizer
        )
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
        engine.destroy()


@distributed(world_size=2)
def test_masters_of_replicas_are_shown_by_group():
    import deepspeed
    from deepspeed.compat.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.zero.optimizer import BF16_Optimizer

    for section in ("fp16", "bf16"):
        model = torch.nn.Linear(3, 2)
        expected = [param.detach().clone() for param in model.parameters()]
        config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, section: {"enabled": True}}
        engine, optimizer, *_ = deepspeed.initialize(
            model=model, config=config, model_parameters=model.parameters()
        )
        assert isinstance(optimizer, FP16_Optimizer) and isinstance(optimizer, BF16_Optimizer) == (
            section == "bf16"
        )
        (flat,), (group,) = optimizer.fp32_groups_flat, optimizer.fp32_groups
        torch.testing.assert_close(
            flat, torch.cat([value.flatten() for value in expected]), atol=1e-2, rtol=1e-2
        )
        assert flat.dtype == torch.float32 and [value.shape for value in group] == [
            value.shape for value in expected
        ]
        assert torch.equal(torch.cat([value.flatten() for value in group]), flat)
        engine.destroy()
