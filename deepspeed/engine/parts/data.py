"""Data loaders and input transforms of an engine: ``engine.data``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from deepspeed.config.constants import ROUTE_TRAIN
from deepspeed.config.problems import DeepSpeedConfigError

if TYPE_CHECKING:
    from deepspeed.data.loader import DeepSpeedDataLoader
    from deepspeed.engine.interface import Engine
    from deepspeed.transforms.inputs import InputChain, InputTransform


class EngineData:
    """``deepspeed_io`` with its samplers, and input transforms.

    Args:
        engine: source of batch sizes and ranks for loaders.
        transforms: initial input transforms.
    """

    def __init__(self, engine: Engine, transforms: Sequence[InputTransform]) -> None:
        self._engine = engine
        self.inputs = _chain(transforms)
        """Transforms of the inputs of every forward, if there are any."""

    def transform(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Transform the arguments of a forward. An error in a transform drops the unfinished update."""
        if self.inputs is None:
            return inputs, kwargs
        engine = self._engine
        try:
            return self.inputs(
                inputs,
                kwargs,
                training=engine.module.training,
                step=engine.global_steps,
                micro_step=engine.clock.micro_steps,
            )
        except BaseException as error:
            if torch.is_grad_enabled():
                engine.abandon_update(error)
            raise

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = ROUTE_TRAIN,
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Return a loader that gives each data-parallel rank its part of ``dataset``. TypeError: not a data set."""
        from deepspeed.data.loader import DeepSpeedDataLoader  # many scripts bring their own loader
        from deepspeed.data.requested_samplers import has_curriculum, varies_batches

        if isinstance(dataset, (DataLoader, DeepSpeedDataLoader, Generator)):
            raise TypeError(
                f"the loader of an engine needs a data set, but this is a {type(dataset).__name__}: pass its data set "
                "(loader.dataset) and collate_fn=, or leave training_data= out and iterate over your loader."
            )
        engine = self._engine
        micro = batch_size or engine._config.train_micro_batch_size_per_gpu
        collate_fn, drop_last = collate_fn or engine.collate_fn, bool(engine._config.dataloader_drop_last)
        if route == ROUTE_TRAIN and data_sampler is None:
            if varies_batches(engine._config):
                from deepspeed.data.data_sampling import variable_batch_size_and_lr

                return variable_batch_size_and_lr.engine_loader(engine, dataset, collate_fn=collate_fn)
            if isinstance(dataset, Sized) and has_curriculum(engine._config):
                data_sampler = self._curriculum_sampler(len(dataset), micro, drop_last)
        if num_local_io_workers is None and data_sampler is not None:
            num_local_io_workers = _workers_of(data_sampler)
        return DeepSpeedDataLoader(
            dataset=dataset,
            batch_size=micro,
            pin_memory=pin_memory and engine.device.type != "cpu",
            local_rank=engine.local_rank,
            tput_timer=getattr(engine, "tput_timer", None) if route == ROUTE_TRAIN else None,
            collate_fn=collate_fn,
            num_local_io_workers=num_local_io_workers,
            data_sampler=data_sampler,
            data_parallel_world_size=engine.mesh.size("dp"),
            data_parallel_rank=engine.mesh.rank("dp"),
            dataloader_drop_last=drop_last,
        )

    def _curriculum_sampler(self, samples: int, micro: int, drop_last: bool) -> Any:
        from deepspeed.data.data_sampling.data_sampler import DeepSpeedDataSampler

        engine = self._engine
        section, steps = engine._config.data_efficiency_config, engine.clock.steps
        rank, size = engine.mesh.rank("dp"), engine.mesh.size("dp")
        return DeepSpeedDataSampler(
            section, samples, micro, rank, size, None, steps, engine.global_rank, drop_last
        )

    def set_data_post_process_func(self, post_process_func: Callable[..., Any]) -> None:
        """Apply ``post_process_func(batch, sampler_state)`` to every batch of the engine's own loader."""
        if self._engine.training_dataloader is not None:
            self._engine.training_dataloader.post_process_func = post_process_func

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: dict[str, Callable[[int], int]]
    ) -> None:
        """Set the functions step -> difficulty of metrics with ``schedule_type`` custom; call before the first batch.
        RuntimeError: the engine's own loader has no curriculum."""
        from deepspeed.data.data_sampling.data_sampler import DeepSpeedDataSampler

        sampler = getattr(self._engine.training_dataloader, "data_sampler", None)
        if not isinstance(sampler, DeepSpeedDataSampler):
            raise RuntimeError(
                "set_custom_curriculum_learning_schedule() needs training_data= in deepspeed.initialize and "
                "data_efficiency.data_sampling.curriculum_learning.enabled=true"
            )
        sampler.set_custom_curriculum_learning_schedule(schedule_func_dict)

    def random_ltd_initialize(self) -> None:
        """Make the converted layers drop tokens; called by ``convert_to_random_ltd(engine, ...)``.

        DeepSpeedConfigError: not enabled in the config, or a configured layer does not exist.
        """
        if self._engine.random_ltd is None:
            raise DeepSpeedConfigError(
                "random_ltd_initialize() needs data_efficiency.data_routing.random_ltd: set enabled to true there, in "
                "data_routing and in data_efficiency"
            )
        self._engine.random_ltd.initialize()

    def add_input_transform(self, transform: InputTransform) -> None:
        """Apply ``transform`` to the inputs of every forward, in training and evaluation. ValueError: its name is
        taken, or its order constraints conflict with those of others."""
        present = self.inputs.transforms if self.inputs is not None else []
        self.inputs = _chain([*present, transform])

    def remove_input_transform(self, name: str) -> None:
        """Remove an input transform. KeyError: there is none of this name."""
        present = self.inputs.transforms if self.inputs is not None else []
        left = [transform for transform in present if transform.name != name]
        if len(left) == len(present):
            raise KeyError(name)
        self.inputs = _chain(left)


def _chain(transforms: Sequence[InputTransform]) -> InputChain | None:
    """Order input transforms into a chain; None if there are none. ValueError: their order constraints conflict."""
    if not transforms:
        return None
    from deepspeed.transforms.inputs import InputChain

    return InputChain(transforms)


def _workers_of(sampler: Any) -> int | None:
    """Return the number of workers of our own sampler, None for others."""
    from deepspeed.data.data_sampling.data_sampler import DeepSpeedDataSampler

    return sampler.num_workers if isinstance(sampler, DeepSpeedDataSampler) else None
