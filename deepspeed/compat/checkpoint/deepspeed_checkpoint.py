"""The files of a 3D-parallel checkpoint in the layout of Megatron-DeepSpeed, read as by fewer ranks than wrote them.

    layer_LL-model_TT-model_states.pt             one pipeline layer, one tensor-parallel rank
    mp_rank_MM_model_states.pt                    all other state of one (stage, tensor-parallel rank)
    zero_pp_rank_D_mp_rank_MM_optim_states.pt     its optimizer state

The first layer is the embedding, the one at ``final_layer_norm_idx`` the final norm; those in between are transformer
blocks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    GROUP_PADDINGS,
    LAYER_FILE_PREFIX,
    MODEL_FILE_PREFIX,
    OPTIMIZER_STATE_DICT,
    PARTITION_COUNT,
    UNIVERSAL_CHECKPOINT_INFO,
)
from deepspeed.compat.checkpoint.reshape_3d_utils import (
    get_model_3d_descriptor,
    get_model_3d_descriptor_from_metadata,
    meg_2d_parallel_map,
    model_3d_desc,
    reshape_meg_2d_parallel,
)
from deepspeed.compat.checkpoint.reshape_utils import (
    basic_folder_validation,
    get_files,
    get_files_with_prefix,
    get_zero_files,
    merge_state,
    partition_data,
    read_states,
    validate_files,
)

EMBEDDING_LAYER_INDEX = 0
FINAL_LAYER_NORM_INDEX = -1
ARGS_KEY = "args"
CHECKPOINT_INFO_KEY = "checkpoint_info"
ITERATION_KEY = "iteration"

SEQUENTIAL_LAYERS = (
    "input_layernorm.weight", "input_layernorm.bias", "self_attention.dense.bias",
    "post_attention_layernorm.weight", "post_attention_layernorm.bias", "mlp.dense_4h_to_h.bias",
    "position_embeddings.weight",
)  # fmt: skip
"""Parameters of Megatron's layers that are replicated over tensor-parallel ranks."""
LAYER_CONCAT_DIM = {"self_attention.dense.weight": 1, "mlp.dense_4h_to_h.weight": 1}
"""Parameters that are split along a dim other than the first."""

_LAYER = re.compile(r"(layer_(\d+))-model_(\d+).*")


class DeepSpeedCheckpoint:
    """The checkpoint in ``dir`` (a tag's folder), as ``tp_degree * pp_degree * dp_degree`` ranks would read it.

    Degrees default to those of the checkpoint. ValueError: a degree does not divide the saved one, or the transformer
    blocks cannot be divided evenly among the stages. FileNotFoundError: ``dir`` does not exist.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        dp_degree: int | None = None,
        final_layer_norm_idx: int = FINAL_LAYER_NORM_INDEX,
    ) -> None:
        basic_folder_validation(dir)
        self.dir = dir
        self.final_layer_norm_idx = final_layer_norm_idx
        self.file_list = get_files(dir)
        self.layer_files = get_files_with_prefix(self.file_list, LAYER_FILE_PREFIX)
        self.mp_rank_files = get_files_with_prefix(self.file_list, MODEL_FILE_PREFIX)
        models = [(path, read_states(path)) for path in self.mp_rank_files]
        source = get_model_3d_descriptor_from_metadata(self.file_list, get_zero_files(dir), models)
        self.zero_checkpoint = ZeROCheckpoint(dir, source)
        self.layer_keys = self._layer_keys()
        self.layer_count = len(self.layer_keys)
        self._take_degrees(source, tp_degree, pp_degree, dp_degree)
        self.global_state = self._global_state(models[0][1]) if models else {}
        self._make_maps()

    def _take_degrees(self, source: model_3d_desc, tp: int | None, pp: int | None, dp: int | None) -> None:
        self.original_tp_degree, self.tp_degree = source.tp_degree, tp or source.tp_degree
        self.original_pp_degree, self.pp_degree = source.pp_degree, pp or source.pp_degree
        self.original_dp_degree, self.dp_degree = source.dp_degree, dp or source.dp_degree
        self.original_world_size = source.world_size()
        self.world_size = self.tp_degree * self.pp_degree * self.dp_degree
        self.zero_checkpoint.reshape(model_3d_desc(self.pp_degree, self.tp_degree, self.dp_degree))

    def _layer_keys(self) -> list[str]:
        found = {m[1]: int(m[2]) for path in self.layer_files if (m := _LAYER.match(os.path.basename(path)))}
        return sorted(found, key=lambda key: found[key])

    @staticmethod
    def _global_state(first: Mapping[str, Any]) -> dict[str, Any]:
        return {
            ITERATION_KEY: first.get(ITERATION_KEY, 0),
            ARGS_KEY: first.get(ARGS_KEY),
            CHECKPOINT_INFO_KEY: first.get(CHECKPOINT_INFO_KEY),
            UNIVERSAL_CHECKPOINT_INFO: first.get(UNIVERSAL_CHECKPOINT_INFO),
        }

    def _make_maps(self) -> None:
        grid = (self.original_pp_degree, self.original_tp_degree)
        self.old_2d_map = meg_2d_parallel_map(*grid)
        self.old_2d_map.simple_init()
        self.new_2d_map = reshape_meg_2d_parallel(*grid, self.pp_degree, self.tp_degree)
        blocks = self.layer_keys[1 : self.layer_count + self.final_layer_norm_idx]
        stages = partition_data(blocks, self.pp_degree) if blocks else [[] for _ in range(self.pp_degree)]
        self.pp_to_transformer_map = dict(enumerate(stages))
        self.transformer_file_map = {
            (tp, pp): [self._files_of_layer(key, tp) for key in keys]
            for pp, keys in self.pp_to_transformer_map.items()
            for tp in range(self.tp_degree)
        }
        self.tp_to_embedding_map = self._files_by_rank(EMBEDDING_LAYER_INDEX)
        self.tp_to_final_norm_map = self._files_by_rank(self.final_layer_norm_idx)

    def _files_by_rank(self, layer: int) -> dict[int, list[str]]:
        if not self.layer_keys:
            return {}
        return {tp: self._files_of_layer(self.layer_keys[layer], tp) for tp in range(self.tp_degree)}

    def _files_of_layer(self, key: str, tp_index: int) -> list[str]:
        """Return the files of the ranks that are merged into rank ``tp_index``."""
        files = get_files_with_prefix(self.layer_files, f"{key}-model_")
        return partition_data(files, self.tp_degree)[tp_index]

    # Weights ------------------------------------------------------------------------------------------------

    def get_embedding_layer_id(self) -> str:
        """Return the key of the embedding layer, such as ``layer_01``."""
        return self.layer_keys[EMBEDDING_LAYER_INDEX]

    def get_final_norm_layer_id(self) -> str:
        return self.layer_keys[self.final_layer_norm_idx]

    def get_embedding_files(self, tp_index: int) -> list[str]:
        self._check("tp_index", tp_index, self.tp_degree)
        return self.tp_to_embedding_map[tp_index]

    def get_embedding_state(self, tp_index: int) -> dict[str, Any]:
        """Return the rank's embedding layer: its rows of the vocabulary."""
        return _joined(self.get_embedding_files(tp_index))

    def get_final_norm_files(self, tp_index: int) -> list[str]:
        self._check("tp_index", tp_index, self.tp_degree)
        return self.tp_to_final_norm_map[tp_index]

    def get_final_norm_state(self, tp_index: int) -> dict[str, Any]:
        """Return the final norm, which is replicated over ranks."""
        return read_states(self.get_final_norm_files(tp_index)[0])

    def get_pp_transformer_map(self, pp_index: int) -> list[str]:
        """Return the transformer blocks of a stage, such as ``["layer_03", "layer_04"]``."""
        self._check("pp_index", pp_index, self.pp_degree)
        return self.pp_to_transformer_map[pp_index]

    def get_transformer_state(self, tp_index: int, pp_index: int) -> list[dict[str, Any]]:
        """Return the rank's part of each transformer block of a stage."""
        self._check("tp_index", tp_index, self.tp_degree)
        self._check("pp_index", pp_index, self.pp_degree)
        return [_joined(files) for files in self.transformer_file_map[(tp_index, pp_index)]]

    # Everything else ----------------------------------------------------------------------------------------

    def get_2d_parallel_files(self, tp_index: int, pp_index: int) -> list[str]:
        """Return the model files of the ranks that are merged into this one."""
        self._check("tp_index", tp_index, self.tp_degree)
        self._check("pp_index", pp_index, self.pp_degree)
        numbers = self.new_2d_map.get_data(pp_index=pp_index, tp_index=tp_index)
        return [self.mp_rank_files[number] for number in numbers]

    def get_2d_parallel_state(self, tp_index: int, pp_index: int) -> dict[str, Any]:
        """Return the content of these files, merged by ``merge_state``."""
        return reduce(
            merge_state, (read_states(path) for path in self.get_2d_parallel_files(tp_index, pp_index))
        )

    def get_zero_files(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        return self.zero_checkpoint.get_files_for_rank(pp_index, tp_index, dp_index)

    def get_zero_checkpoint_state(
        self, pp_index: int, tp_index: int, dp_index: int, strip_tensor_paddings: bool = True
    ) -> dict[str, Any]:
        """Return the optimizer state of a rank; see ``ZeROCheckpoint.get_state_for_rank``."""
        return self.zero_checkpoint.get_state_for_rank(
            pp_index, tp_index, dp_index, strip_tensor_paddings=strip_tensor_paddings
        )

    def get_iteration(self) -> int:
        return self.global_state[ITERATION_KEY]

    def get_args(self) -> Any:
        """Return the arguments of the training script, if saved under ``args``."""
        return self.global_state[ARGS_KEY]

    def get_checkpoint_info(self, info_key: str = CHECKPOINT_INFO_KEY) -> Any:
        """Return what the client saved under ``checkpoint_info`` (or ``universal_checkpoint_info``); None if there is
        none."""
        return self.global_state.get(info_key)

    def validate_files(self) -> None:
        """Check that all files still exist. FileNotFoundError names a missing one."""
        validate_files(self.file_list)

    @staticmethod
    def _check(what: str, index: int, degree: int) -> None:
        if not 0 <= index < degree:
            raise IndexError(f"{what}={index} is not below the degree, {degree}")


def _joined(files: Sequence[str]) -> dict[str, Any]:
    """Merge the files of a layer's tensor-parallel ranks."""
    states = [read_states(path) for path in files]
    return {key: _join(key, [state[key] for state in states]) for key in states[0]}


def _join(key: str, values: Sequence[Any]) -> Any:
    if not isinstance(values[0], Tensor) or len(values) == 1 or _ends_with(key, SEQUENTIAL_LAYERS):
        return values[0]
    dim = next((d for name, d in LAYER_CONCAT_DIM.items() if _ends_with(key, [name])), 0)
    return torch.cat(list(values), dim)


def _ends_with(key: str, names: Iterable[str]) -> bool:
    return any(key == name or key.endswith(f".{name}") for name in names)


# Optimizer files of a 3D-parallel checkpoint, merged for fewer ranks.


class ZeROCheckpoint:
    """The optimizer files in ``dir``. ``source_3d``: its degrees of parallelism; default: found from the files.

    ValueError: there are fewer files than ranks.
    """

    def __init__(self, dir: str | os.PathLike[str], source_3d: model_3d_desc | None = None) -> None:
        basic_folder_validation(dir)
        self.dir = dir
        self.file_list = get_zero_files(dir)
        self.num_files = len(self.file_list)
        validate_files(self.file_list)
        self.src_3d = source_3d if source_3d is not None else get_model_3d_descriptor(dir)
        if self.num_files and self.num_files != self.src_3d.world_size():
            raise ValueError(
                f"{dir} holds {self.num_files} optimizer files, but {self.src_3d.get_desc()} has "
                f"{self.src_3d.world_size()} ranks"
            )
        self.reshape(self.src_3d)

    def reshape(self, target_3d: model_3d_desc) -> None:
        """Merge for the ranks of ``target_3d`` from now on. ValueError: a degree is larger than the current one, or
        does not divide it."""
        self._3d_file_map = self.src_3d.reshape(target_3d)
        self.target_3d = target_3d

    def get_file_indices_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[int]:
        """Return the positions in ``file_list`` of the files of a rank's state. IndexError: there is no such rank."""
        valid, problems = self.target_3d.is_valid(pp_index, tp_index, dp_index)
        if not valid:
            raise IndexError("; ".join(problems))
        return self._3d_file_map[dp_index].get_data(pp_index, tp_index)

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        return [
            self.file_list[number] for number in self.get_file_indices_for_rank(pp_index, tp_index, dp_index)
        ]

    def get_state_for_rank(
        self,
        pp_index: int,
        tp_index: int,
        dp_index: int,
        keys_to_ignore: Sequence[str] = (),
        strip_tensor_paddings: bool = True,
    ) -> dict[str, Any]:
        """Return the states of a rank's files, merged as by ``merge_state``.

        ``keys_to_ignore``: entries of the optimizer's state to leave out. ``strip_tensor_paddings``: remove the padding
        at the end of each file's moments; ``group_paddings`` is then 0.
        """
        states: list[dict[str, Any]] = []
        for path in self.get_files_for_rank(pp_index, tp_index, dp_index):
            state = read_states(path)
            section = state[OPTIMIZER_STATE_DICT]
            for key in keys_to_ignore:
                section.pop(key, None)
            if strip_tensor_paddings:
                _strip(section)
            states.append(state)
        joined = reduce(merge_state, states)
        section = joined[OPTIMIZER_STATE_DICT]
        if PARTITION_COUNT in section:
            counts = section[PARTITION_COUNT]
            count = self.target_3d.dp_degree
            section[PARTITION_COUNT] = [count] * len(counts) if isinstance(counts, list) else count
        return joined


def _strip(section: dict[str, Any]) -> None:
    """Remove the padding of the moments of stages 1 and 2; master weights are saved without padding."""
    paddings = section.get(GROUP_PADDINGS)
    base = section.get(BASE_OPTIMIZER_STATE)
    if not paddings or not isinstance(base, dict):
        return
    for number, padding in enumerate(paddings):
        for kind, value in base["state"].get(number, {}).items():
            if padding and isinstance(value, Tensor) and value.dim():
                base["state"][number][kind] = value[: value.numel() - padding]
    section[GROUP_PADDINGS] = [0] * len(paddings)
