"""State dicts of Megatron models, resharded from one tensor-parallel size to another.

A file holds the weights of one rank. For fewer ranks files are merged, for more each is split, along the dim that
Megatron cuts; the three parts of a fused query-key-value weight are cut separately.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.logging import logger
from deepspeed.checkpoint.storage.torch_checkpoint_engine import TorchCheckpointEngine

AUTO_MODULE_KEY = "auto"
"""The model's weights are under "module" or "model", whichever there is."""
WHOLE_DESCRIPTIONS = ("bloom", "ds_model")
"""Checkpoint types that are only a list of files, which the model's own loader reads."""

State = dict[str, Any]


class SDLoaderFactory:
    """Makes the loader for a checkpoint's type."""

    @staticmethod
    def get_sd_loader_json(
        json_file: str | os.PathLike[str] | Mapping[str, Any], checkpoint_engine: Any
    ) -> Any:
        """Return the loader for a description: ``{"type", "version", "checkpoints": [files]}``, or the path of a JSON
        file with it. Types that need no merging ("bloom", "ds_model") return the description."""
        if isinstance(json_file, Mapping):
            data = json_file
        else:
            with open(json_file, encoding="utf-8") as file:
                data = json.load(file)
        if str(data["type"]).lower() in WHOLE_DESCRIPTIONS:
            return data
        return SDLoaderFactory.get_sd_loader(
            data["checkpoints"], checkpoint_engine, data["type"], data.get("version")
        )

    @staticmethod
    def get_sd_loader(
        ckpt_list: Sequence[str],
        checkpoint_engine: Any,
        sd_type: str = "Megatron",
        version: float | None = None,
    ) -> MegatronSDLoader:
        if sd_type != "Megatron":
            raise ValueError(f"sd_type={sd_type!r}: only 'Megatron' is supported")
        return MegatronSDLoader(ckpt_list, version, checkpoint_engine)


class MegatronSDLoader:
    """GPT-2 and BERT of Megatron-LM.

    A fused weight has its rows in an order that depends on the version of the checkpoint, by (part, head, row of the
    head): version 0 part first, [3 x heads x rows]; 1 [heads x rows x 3]; 2 [heads x 3 x rows]. In the latter two a
    rank's heads are contiguous rows.

    ``ckpt_list``: the files in the order of their ranks. ``checkpoint_engine``: reads one; None: torch's format.
    """

    ROWS = (
        "mlp.dense_h_to_4h.weight",
        "mlp.dense_h_to_4h.bias",
        "word_embeddings.weight",
        "final_linear.weight",
    )
    """Cut along dim 0."""
    COLUMNS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")
    """Cut along dim 1."""
    FUSED = "attention.query_key_value"

    def __init__(self, ckpt_list: Sequence[str], version: float | None, checkpoint_engine: Any) -> None:
        self.ckpt_list = list(ckpt_list)
        self.version = version
        self.checkpoint_engine = TorchCheckpointEngine() if checkpoint_engine is None else checkpoint_engine
        self.module_key: str | None = None
        self.check_ckpt_list()

    def load(
        self,
        mp_world_size: int,
        mp_rank: int,
        module_key: str | None = AUTO_MODULE_KEY,
        is_pipe_parallel: bool = False,
        quantize: bool = False,
        quantize_bits: int = 8,
        quantize_groups: int = 64,
        mlp_extra_grouping: bool = True,
    ) -> tuple[str, State, tuple[None, int]]:
        """Return ``(file, state dict, (None, number of files merged))`` for rank ``mp_rank`` of ``mp_world_size``.

        ``module_key``: key of the weights in a file; None: the file is the state dict itself. A pipeline's model
        files (``is_pipe_parallel``) hold no weights, so with another number of ranks all read the first file.
        ValueError: neither number of ranks is a multiple of the other.
        """
        self.module_key = module_key
        files = len(self.ckpt_list)
        if is_pipe_parallel and module_key is not None and mp_world_size != files:
            mp_world_size, mp_rank = files, 0
        if not 0 <= mp_rank < mp_world_size:
            raise ValueError(f"mp_rank={mp_rank}: expected 0 to {mp_world_size - 1}")
        if quantize:
            raise ValueError(
                "quantize=True: weights are loaded as they are; quantize the model after loading"
            )
        path = self.ckpt_list[mp_rank * files // mp_world_size]
        if files == mp_world_size:
            if not os.path.exists(path):
                raise FileNotFoundError(f"{path}, the file of rank {mp_rank}, is missing")
            return path, self._read(path), (None, 1)
        if files > mp_world_size:
            state, _ = self.merge_state_dict(mp_world_size, mp_rank)
            return path, state, (None, files // mp_world_size)
        state, _ = self.split_state_dict(mp_world_size, mp_rank)
        return path, state, (None, 1)

    def _read(self, path: str) -> State:
        state: Any = self.checkpoint_engine.load(path, map_location="cpu")
        saved = state.get("mp_world_size") if hasattr(state, "get") else None
        if saved is not None and saved != len(self.ckpt_list):
            raise ValueError(
                f"{path} belongs to a checkpoint of {saved} model-parallel ranks, but {len(self.ckpt_list)} "
                "files were given: ckpt_list needs one file per rank"
            )
        return state

    def get_merge_state_dicts(self, mp_world_size: int, mp_rank: int) -> list[State]:
        """Return the contents of the files that rank ``mp_rank`` of fewer ranks merges."""
        files = len(self.ckpt_list)
        if files % mp_world_size:
            raise ValueError(f"{files} files cannot be merged for {mp_world_size} ranks: not a multiple")
        each = files // mp_world_size
        return [self._read(path) for path in self.ckpt_list[mp_rank * each : (mp_rank + 1) * each]]

    def get_split_state_dict(self, mp_world_size: int, mp_rank: int) -> tuple[State, int, int]:
        """Return (content of the file that rank ``mp_rank`` of more ranks splits, number of parts, its part's
        index)."""
        files = len(self.ckpt_list)
        if mp_world_size % files:
            raise ValueError(f"{files} files cannot be split for {mp_world_size} ranks: not a multiple")
        parts = mp_world_size // files
        return self._read(self.ckpt_list[mp_rank // parts]), parts, mp_rank % parts

    def get_module(self, sd: State) -> State:
        """Return the weights in the content of a file."""
        key = self._key(sd)
        return sd if key is None else sd[key]

    def set_module(self, sd: State, module: State) -> State:
        """Return ``sd`` with its weights replaced by ``module``."""
        key = self._key(sd)
        if key is None:
            return module
        sd[key] = module
        return sd

    def _key(self, sd: State) -> str | None:
        if self.module_key != AUTO_MODULE_KEY:
            return self.module_key
        found = [key for key in ("module", "model") if key in sd]
        if len(found) != 1:
            raise ValueError(f"expected a key 'module' or 'model' among {list(sd)}: pass module_key")
        return found[0]

    def check_ckpt_list(self) -> None:
        """Check the files. ValueError: the list is empty; FileNotFoundError: the first file is missing."""
        if not self.ckpt_list:
            raise ValueError("ckpt_list is empty: there is no checkpoint to load")
        if not os.path.exists(self.ckpt_list[0]):
            raise FileNotFoundError(f"{self.ckpt_list[0]}, the first file of the checkpoint, is missing")

    def merge_query_key_value(self, param_list: Sequence[Tensor], ckpt_ver: float) -> Tensor:
        """Return the fused weight or bias of all heads, merged from consecutive ranks."""
        if _part_first(ckpt_ver):
            parts = [param.chunk(3, dim=0) for param in param_list]
            return torch.cat([piece for part in zip(*parts, strict=True) for piece in part], dim=0)
        return torch.cat(list(param_list), dim=0)

    def split_query_key_value(self, param: Tensor, num_to_split: int, offset: int, ckpt_ver: float) -> Tensor:
        """Return part number ``offset`` of ``num_to_split`` of a fused weight or bias."""
        if _part_first(ckpt_ver):
            return torch.cat([_part(each, num_to_split, offset, 0) for each in param.chunk(3, dim=0)], dim=0)
        return _part(param, num_to_split, offset, 0)

    def merge_state_dict(
        self,
        mp_world_size: int,
        mp_rank: int,
        quantize: bool = False,
        quantize_bits: int = 8,
        groups: int = 64,
        mlp_extra_grouping: bool = True,
    ) -> tuple[State, None]:
        """Return (state dict for rank ``mp_rank`` of fewer ranks, None in place of quantization scales)."""
        self.sanity_check(self.ckpt_list[0])
        states = self.get_merge_state_dicts(mp_world_size, mp_rank)
        version = self.get_checkpoint_version(states[0])
        modules = [self.get_module(state) for state in states]
        merged = {}
        for name, value in modules[0].items():
            values = [module[name] for module in modules]
            if self.FUSED in name:
                value = self.merge_query_key_value(values, version)
            elif (dim := self._dim(name)) is not None:
                value = torch.cat(values, dim=dim)
            merged[name] = value
        return self.set_module(states[0], merged), None

    def split_state_dict(
        self,
        mp_world_size: int,
        mp_rank: int,
        quantize: bool = False,
        quantize_bits: int = 8,
        groups: int = 64,
        mlp_extra_grouping: bool = True,
    ) -> tuple[State, None]:
        """Return (state dict for rank ``mp_rank`` of more ranks, None)."""
        state, parts, number = self.get_split_state_dict(mp_world_size, mp_rank)
        version = self.get_checkpoint_version(state)
        split = {}
        for name, value in self.get_module(state).items():
            if self.FUSED in name:
                value = self.split_query_key_value(value, parts, number, version)
            elif (dim := self._dim(name)) is not None:
                value = _part(value, parts, number, dim)
            split[name] = value
        return self.set_module(state, split), None

    def _dim(self, name: str) -> int | None:
        if any(key in name for key in self.COLUMNS):
            return 1
        return 0 if any(key in name for key in self.ROWS) else None

    def sanity_check(self, ckpt_file_name: str) -> None:
        """Raise ValueError unless the file holds a model of this type."""
        weights = self.get_module(self._read(ckpt_file_name))
        for key in (*self.COLUMNS, self.FUSED, self.ROWS[0]):
            if not any(key in name for name in weights):
                raise ValueError(f"{ckpt_file_name} holds no {key}: it is not a Megatron model checkpoint")

    def get_checkpoint_version(self, state_dict: State) -> float:
        """Return the version given, else the file's, else 0 with a warning."""
        if self.version is not None:
            return self.version
        if "checkpoint_version" not in state_dict:
            logger.warning(
                "The checkpoint has no checkpoint_version: assuming version 0 for its fused weights."
            )
        return state_dict.get("checkpoint_version", 0)


def _part_first(version: float) -> bool:
    if version not in (0, 1.0, 2.0):
        raise ValueError(
            f"checkpoint version {version}: the order of fused weights is known for 0, 1.0 and 2.0"
        )
    return version == 0


def _part(value: Tensor, parts: int, number: int, dim: int) -> Tensor:
    """Return a copy of part ``number``, so that saving it does not write the whole storage."""
    if value.shape[dim] % parts:
        raise ValueError(
            f"a weight [{tuple(value.shape)}] cannot be split into {parts} parts along dim {dim}"
        )
    size = value.shape[dim] // parts
    return value.narrow(dim, number * size, size).clone()
