"""The engine's weights as whole tensors: exports."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from deepspeed.base.logging import logger
from deepspeed.checkpoint.contents import shared_names
from deepspeed.checkpoint.export import save_weights
from deepspeed.checkpoint.files.archive_writer import LazyTensor
from deepspeed.checkpoint.numbered import names_on_all
from deepspeed.checkpoint.originals import ExportedTensors, Expression, Weight
from deepspeed.checkpoint.placement import placement_of
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.renaming import exported_name, wrapper_of
from deepspeed.checkpoint.sharded_weights import ShardedWeights
from deepspeed.zero.gathering.gathered_parameters import GatheredParameters
from deepspeed.zero.placements import whole_tensor

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine


def gathered(engine: Engine, *, modified: bool) -> GatheredParameters:
    """Gather partitioned parameters inside the block if their values are about to be ``modified``. Collective."""
    return GatheredParameters(list(engine.module.parameters()), modifier_rank=0, enabled=modified)


def save_16bit_model(
    engine: Engine,
    save_dir: str | os.PathLike[str],
    save_filename: str = "pytorch_model.bin",
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write the model's weights in their own dtype to ``save_dir/save_filename``, from rank 0. Collective.

    Names and shapes are those of the untransformed module, without the prefixes of ``torch.compile`` and
    ``DataParallel``. A name ending in ``.safetensors`` selects that format. Tied weights are written once.
    Partitioned parameters are gathered one by one as they are written; if
    ``stage3_gather_16bit_weights_on_model_save`` is off, nothing is written and False is returned.
    """
    if ShardedWeights(engine.module) and not engine._config.zero_config.gather_16bit_weights_on_model_save:
        logger.warning(
            f"{save_filename} was not written: zero_optimization.stage3_gather_16bit_weights_on_model_save "
            "is false. Set it to true, or run zero_to_fp32.py on a checkpoint"
        )
        return False
    ranks, path = Ranks(), Path(save_dir) / save_filename
    source = engine.of_all_stages(_WholeWeights(engine, exclude_frozen_parameters))
    with ranks.together("saving the model"), source:
        if ranks.rank == 0:
            save_weights(
                source.tensors(),
                path.parent,
                aliases=source.aliases,
                filename=path.name,
                safetensors=path.suffix == ".safetensors",
            )
    return True


def consolidated_16bit_state_dict(
    engine: Engine, exclude_frozen_parameters: bool = False
) -> dict[str, Tensor] | None:
    """Return the state dict of the whole, untransformed model in the weights' own dtype, on rank 0's host; None on
    the others. Collective."""
    with engine.of_all_stages(_WholeWeights(engine, exclude_frozen_parameters)) as source:
        if engine.global_rank != 0:
            return None
        made = {
            name: part.to("cpu", copy=True)
            for name, tensor in source.tensors().items()
            for part in tensor.parts()
        }
    return made | {alias: made[name] for alias, name in source.aliases.items() if name in made}


def whole(engine: Engine, param: Tensor, value: Tensor | None = None) -> Tensor:
    """Return the global tensor of ``param``, or of ``value`` with its placement. Collective."""
    if value is not None:
        return whole_tensor(value, engine.replica_groups, of=param)
    with GatheredParameters([param]):
        return whole_tensor(param, engine.replica_groups).clone()


class _WholeWeights:
    """The tensors of an export, gathered one at a time and in the same order on all ranks: rank 0 requests each, and
    the others join the gathers until the block ends, even after an error on rank 0. Tensor-parallel parts are joined;
    lists distributed over ranks, such as experts, are complete.

    A tensor stays gathered only until the next one is requested. ``aliases``: other name -> name.
    """

    def __init__(self, engine: Engine, exclude_frozen: bool) -> None:
        state = engine.checkpoints.module_state_dict(keep_vars=True, exclude_frozen_parameters=exclude_frozen)
        self.replica_groups = engine.replica_groups
        shared = shared_names(engine.module)
        on_all = names_on_all(engine.module)
        self.weights: dict[str, Tensor] = {}
        self.share: dict[str, int] = {}
        for name, value in state.items():
            if isinstance(value, Tensor) and name not in shared:
                self.share.update({each: share for share, each in enumerate(on_all.get(name, ()))})
                self.weights.update(dict.fromkeys(on_all.get(name, (name,)), value))
        aliases = {alias: name for alias, name in shared.items() if name in self.weights}
        originals = engine.module_transforms.originals
        if originals is None:
            exported = ExportedTensors({name: Weight(name) for name in self.weights}, aliases)
        else:
            exported = originals.exported(self.weights, aliases)
        wrapper = wrapper_of(engine.module)
        self.left: dict[str, Expression] = {
            exported_name(name, wrapper): made for name, made in exported.tensors.items()
        }
        self.aliases = {
            exported_name(alias, wrapper): exported_name(name, wrapper)
            for alias, name in exported.aliases.items()
        }
        self._current: Generator[Tensor, None, None] | None = None

    def tensors(self) -> dict[str, LazyTensor]:
        return {
            name: LazyTensor(
                made.shape(lambda each: self._shape(self.weights[each])),
                made.dtype(lambda each: self.weights[each].dtype),
                lambda name=name: self._take(name),
            )
            for name, made in self.left.items()
        }

    def _take(self, name: str) -> Generator[Tensor, None, None]:
        assert next(iter(self.left)) == name, "tensors must be requested in order"
        self._current = self._whole(self.left.pop(name))
        return self._current

    @staticmethod
    def _shape(value: Tensor) -> tuple[int, ...]:
        return placement_of(value).global_shape

    def _whole(self, made: Expression) -> Generator[Tensor, None, None]:
        with self._gathered(made):
            yield made.value(self._joined(made).__getitem__)

    def _joined(self, made: Expression) -> dict[str, Tensor]:
        """Return the whole tensors that ``made`` reads. Collective if ranks hold parts of them."""
        return {
            name: whole_tensor(self.weights[name], self.replica_groups, share=self.share.get(name))
            for name in made.names()
        }

    def _gathered(self, made: Expression) -> GatheredParameters:
        return GatheredParameters([self.weights[name] for name in made.names()])

    def __enter__(self) -> _WholeWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._current is not None:
            self._current.close()
        for made in self.left.values():
            with self._gathered(made):
                self._joined(made)
        self.left.clear()
