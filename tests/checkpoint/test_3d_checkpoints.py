"""``DeepSpeedCheckpoint`` and the grids behind it. The expected values are what release 0.19.8 answers for the same
folder, apart from single values such as a step, which it cannot join."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
import torch

import deepspeed
from deepspeed.checkpoint import (
    PARAMETER_WITH_SUB_PARAMS,
    DeepSpeedCheckpoint,
    SubparamShape,
    ZeROCheckpoint,
    catalog_reader,
    enable_universal_checkpoint,
)
from deepspeed.checkpoint.catalog import ParamGroup
from deepspeed.checkpoint.foreign.splits import DescribedCuts
from deepspeed.compat.checkpoint.reshape_3d_utils import (
    get_model_3d_descriptor,
    meg_2d_parallel_map,
    model_3d_desc,
    reshape_meg_2d_parallel,
)
from deepspeed.compat.checkpoint.reshape_utils import merge_state, partition_data, sort_zero_files
from tests.checkpoint.make_universal_checkpoints import UNIVERSAL
from tests.checkpoint.make_upstream_checkpoints import config, groups, model
from tests.checkpoint.models import full_state
from tests.checkpoint.test_upstream import expected
from tests.pool import distributed

TP, PP, DP = 2, 2, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages of two blocks each, two tensor-parallel and two data-parallel ranks."""
    made = tmp_path_factory.mktemp("meg")
    for tp in range(TP):
        name = f"model_{tp:02d}-model_states.pt"
        embedding = {"word_embeddings.weight": torch.full((4, 3), float(tp))}
        torch.save({**embedding, "position_embeddings.weight": torch.ones(2, 3)}, made / f"layer_01-{name}")
        for layer in (3, 4, 5, 6):
            block = {
                "input_layernorm.weight": torch.full((3,), float(layer)),
                "self_attention.query_key_value.weight": torch.full((2, 3), float(tp)),
                "self_attention.dense.weight": torch.full((3, 2), float(tp)),
                "self_attention.dense.bias": torch.ones(3),
            }
            torch.save(block, made / f"layer_{layer:02d}-{name}")
        torch.save({"weight": torch.ones(3)}, made / f"layer_08-{name}")
    for place in range(TP * PP):
        content = {
            "iteration": 77,
            "args": argparse.Namespace(hidden_size=3),
            "checkpoint_info": {"x": 1},
            "universal_checkpoint_info": {"v": 1},
            "mp_world_size": TP,
            "t": torch.full((2,), float(place)),
        }
        torch.save(content, made / f"mp_rank_{place:02d}_model_states.pt")
        for rank in range(DP):
            value = torch.full((3,), 10.0 * place + rank)
            section = {
                "group_paddings": [rank],
                "single_partition_of_fp32_groups": [value],
                "base_optimizer_state": {"state": {0: {"exp_avg": value, "step": torch.tensor(3.0)}}},
                "partition_count": [DP],
            }
            path = made / f"zero_pp_rank_{rank}_mp_rank_{place:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": section}, path)
    return made


def names(paths: list[str]) -> list[str]:
    return [Path(path).name.split("_model_states")[0].split("-model_states")[0] for path in paths]


def test_as_it_was_saved(folder: Path) -> None:
    found = DeepSpeedCheckpoint(folder)
    assert (found.tp_degree, found.pp_degree, found.dp_degree, found.world_size) == (2, 2, 2, 8)
    assert (found.get_embedding_layer_id(), found.get_final_norm_layer_id()) == ("layer_01", "layer_08")
    assert found.get_iteration() == 77 and found.get_args().hidden_size == 3
    assert found.get_checkpoint_info() == {"x": 1}
    assert found.get_checkpoint_info("universal_checkpoint_info") == {"v": 1}
    assert found.get_pp_transformer_map(1) == ["layer_05", "layer_06"]
    assert names(found.get_2d_parallel_files(tp_index=0, pp_index=1)) == ["mp_rank_02"]
    assert names(found.get_embedding_files(1)) == ["layer_01-model_01"]
    state = found.get_zero_checkpoint_state(0, 0, 1)["optimizer_state_dict"]
    assert state["base_optimizer_state"]["state"][0]["exp_avg"].tolist() == [1.0, 1.0]
    assert (state["group_paddings"], state["partition_count"]) == ([0], [2])
    found.validate_files()
    with pytest.raises(IndexError, match="tp_index=2 is not below the degree, 2"):
        found.get_embedding_state(2)


def test_for_fewer_ranks(folder: Path) -> None:
    found = DeepSpeedCheckpoint(folder, tp_degree=1, pp_degree=1, dp_degree=1)
    embedding = found.get_embedding_state(0)
    assert embedding["word_embeddings.weight"].mean(1).tolist() == [0.0] * 4 + [1.0] * 4
    assert embedding["position_embeddings.weight"].shape == (2, 3)
    blocks = found.get_transformer_state(0, 0)
    assert [block["input_layernorm.weight"][0].item() for block in blocks] == [3.0, 4.0, 5.0, 6.0]
    assert blocks[0]["self_attention.query_key_value.weight"].mean(1).tolist() == [0.0, 0.0, 1.0, 1.0]
    assert blocks[0]["self_attention.dense.weight"].tolist() == [[0.0, 0.0, 1.0, 1.0]] * 3
    assert (
        blocks[0]["self_attention.dense.bias"].shape == found.get_final_norm_state(0)["weight"].shape == (3,)
    )
    assert found.get_2d_parallel_state(0, 0)["t"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    files = [Path(file).name[:28] for file in found.get_zero_files(0, 0, 0)]
    assert files == [f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_op" for mp in range(4) for dp in range(2)]
    state = found.get_zero_checkpoint_state(0, 0, 0)["optimizer_state_dict"]
    masters = [value for mp in range(4) for dp in range(2) for value in [10.0 * mp + dp] * 3]
    assert state["single_partition_of_fp32_groups"][0].tolist() == masters
    assert state["base_optimizer_state"]["state"][0]["step"] == 3.0 and state["partition_count"] == [1]
    for degrees in ({"tp_degree": 4}, {"pp_degree": 4}, {"dp_degree": 3}):
        with pytest.raises(ValueError, match="not supported|does not divide"):
            DeepSpeedCheckpoint(folder, **degrees)
    with pytest.raises(FileNotFoundError):
        DeepSpeedCheckpoint(folder / "nothing")


def test_grids() -> None:
    grid = reshape_meg_2d_parallel(2, 4, 2, 2)
    assert grid.map == {"0,0": [0, 1], "0,1": [2, 3], "1,0": [4, 5], "1,1": [6, 7]}
    assert grid.get_data() == list(range(8)) and grid.get_data(pp_index=1) == [4, 5, 6, 7]
    assert reshape_meg_2d_parallel(4, 2, 2, 1).map == {"0,0": [0, 1, 2, 3], "1,0": [4, 5, 6, 7]}
    for degrees in ((2, 2, 4, 2), (3, 2, 2, 2)):
        with pytest.raises(ValueError, match="pp_degree"):
            reshape_meg_2d_parallel(*degrees)
    with pytest.raises(TypeError):
        meg_2d_parallel_map(1, 2).add_data(0, 0, 5)  # type: ignore[arg-type]
    source, target = model_3d_desc(2, 2, 4), model_3d_desc(2, 1, 2)
    assert [each.map for each in source.reshape(target)] == [
        {"0,0": [0, 4, 8, 12], "1,0": [2, 6, 10, 14]},
        {"0,0": [1, 5, 9, 13], "1,0": [3, 7, 11, 15]},
    ]
    assert source.get_desc() == "PP,TP,DP = (2, 2, 4)" and source.world_size() == 16
    assert source.is_valid(2, 0, 0) == (False, ["PP indexing error: index 2 >= degree 2"])
    assert target.can_reshape(source)[1][0] == "Expansion reshape not supported - TP: 1 ---> 2"


def test_files_and_states(folder: Path) -> None:
    assert get_model_3d_descriptor(folder).get_desc() == "PP,TP,DP = (2, 2, 2)"
    files = [
        "a/zero_pp_rank_10_mp_rank_00_x",
        "a/zero_pp_rank_2_mp_rank_01_x",
        "a/zero_pp_rank_2_mp_rank_00_x",
    ]
    assert sort_zero_files(files, "zero_pp_rank_") == [files[2], files[1], files[0]]
    assert partition_data([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]
    joined = merge_state(
        {"a": torch.ones(2), "b": [torch.zeros(1)], "c": 5}, {"a": torch.ones(3), "b": [torch.ones(1)]}
    )
    assert joined["a"].shape == (5,) and joined["b"][0].tolist() == [0, 1] and joined["c"] == 5
    with pytest.raises(ValueError, match="lists of 1 and of 2 items, under groups.5"):
        merge_state({"groups": {5: [1]}}, {"groups": {5: [1, 2]}})
    with pytest.raises(ValueError, match="a list and a dict cannot be joined, under state.groups"):
        merge_state({"groups": []}, {"groups": {}}, ["state"])
    zero = ZeROCheckpoint(folder)
    assert zero.get_file_indices_for_rank(0, 0, 1) == [4]
    assert Path(zero.get_files_for_rank(1, 0, 1)[0]).name == "zero_pp_rank_1_mp_rank_02_optim_states.pt"
    zero.reshape(model_3d_desc(1, 1, 1))
    assert zero.get_file_indices_for_rank(0, 0, 0) == [0, 4, 1, 5, 2, 6, 3, 7]


def save_model_files(folder: Path, *degrees: dict[str, int] | None) -> None:
    for place, recorded in enumerate(degrees):
        content = {"checkpoint_parallel_dimensions": recorded} if recorded else {}
        torch.save(content, folder / f"mp_rank_{place:02d}_model_states.pt")


def test_recorded_degrees_are_those_of_all_model_files(tmp_path: Path) -> None:
    stages, split = {"pp_degree": 2, "tp_degree": 1}, {"pp_degree": 1, "tp_degree": 2}
    save_model_files(tmp_path, stages, stages)
    assert get_model_3d_descriptor(tmp_path).get_desc() == "PP,TP,DP = (2, 1, 1)"
    assert DeepSpeedCheckpoint(tmp_path).pp_degree == 2
    save_model_files(tmp_path, stages, None)
    for reads in (get_model_3d_descriptor, DeepSpeedCheckpoint):
        with pytest.raises(RuntimeError, match="is missing from model-state files .*mp_rank_01"):
            reads(tmp_path)
    save_model_files(tmp_path, split, stages)
    with pytest.raises(RuntimeError, match="disagrees across model-state files"):
        get_model_3d_descriptor(tmp_path)


@pytest.mark.parametrize("layer", [0, 2, 12])
def test_tensor_parallel_ranks_by_the_files_of_any_layer(tmp_path: Path, layer: int) -> None:
    """Layers without weights have no files; files of experts, which each rank has its own of, are none of a layer."""
    save_model_files(tmp_path, *[None] * 4)
    for tp in range(2):
        torch.save({}, tmp_path / f"layer_{layer:02d}-model_{tp:02d}-model_states.pt")
        torch.save({}, tmp_path / f"layer_0_expert_{tp}_mp_rank_00_model_states.pt")
    assert get_model_3d_descriptor(tmp_path).get_desc() == "PP,TP,DP = (2, 2, 1)"


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_one_parameter_from_its_folder(stage: int) -> None:
    net = model()
    engine = deepspeed.initialize(model=net, model_parameters=groups(net), config=config(stage, "fp32"))[0]
    trained = {name: param for name, param in net.named_parameters() if param.requires_grad}
    enable_universal_checkpoint(net.parameters())
    for name in ("l1.weight", "norm.bias"):
        folder = UNIVERSAL / "stage2_bf16/universal/zero" / name
        assert trained[name].load_hp_checkpoint_state(folder, 0, 1) == 3
    reference, found = expected(2, "bf16"), full_state(engine)
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        for name in ("l1.weight", "norm.bias"):
            assert torch.equal(net.get_parameter(name).view(-1), reference[f"{name}/fp32"].view(-1))
            for kind in ("fp32", "exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(found[f"{name}/{kind}"].view(-1), reference[f"{name}/{kind}"].view(-1)), (
                    kind
                )
    with pytest.raises(ValueError, match="no engine trains this parameter"):
        net.frozen.weight.load_hp_checkpoint_state(folder, 0, 1)


def test_the_description_of_fused_parameters() -> None:
    shape = SubparamShape(patterns=["qkv"], shape=((6, 2, 2), 4), partition_dim=0)
    described = DescribedCuts({PARAMETER_WITH_SUB_PARAMS: [dataclasses.asdict(shape)]})
    parts = described.placements("qkv.weight", [(5, 4), (5, 4)])
    assert parts[1].boxes == (((3, 6), (0, 4)), ((7, 8), (0, 4)), ((9, 10), (0, 4)))
    assert parts[0].global_shape == (10, 4) and described.placements("up", [(5, 4)] * 2)[1].boxes == (
        ((5, 10), (0, 4)),
    )


def test_groups_of_stages_join_where_their_options_are_equal() -> None:
    """Not by position: the stages of Muon with two groups of a user's have other matrices and other vectors."""
    first = [ParamGroup({"use_muon": True, "decay": 0.1}, ("a",)), ParamGroup({"decay": 0.1}, ("embedding",))]
    second = [ParamGroup({"use_muon": True, "decay": 0.1}, ("b",)), ParamGroup({"decay": 0.0}, ("norm",))]
    joined = catalog_reader._joined(first, second)
    assert [group.names for group in joined] == [("a", "b"), ("embedding",), ("norm",)]
    assert joined[2].options == {"decay": 0.0}
