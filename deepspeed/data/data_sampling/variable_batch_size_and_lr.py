"""Batches of about equal token count and varying sample count, with the learning rate scaled to match.

Sequences are packed up to ``max_tokens``; ``train_batch_size`` packs are one batch, and the learning rate, chosen for
``train_batch_size`` samples, is scaled to the batch's actual number of samples (Goyal et al. 2017, Krizhevsky 2014).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from deepspeed.base.logging import logger
from deepspeed.base.stateful import LoadsStateDict, state_of
from deepspeed.data.data_sampling.sequence_lengths import sequence_lengths
from deepspeed.data.data_sampling.token_batches import TokenBatches, pack
from deepspeed.data.data_sampling.token_batches import scale_lr as scale_lr
from deepspeed.data.data_sampling.variable_batch_loader import PadSample, VariableBatchLoader
from deepspeed.optim.lr_schedules import get_torch_optimizer, update_lr

Collate = Callable[[list[Any]], Any]


# Batches ---------------------------------------------------------------------------------------------------------


def batch_by_seqlens(
    seqlens: Any,
    max_tokens: int,
    sequence_ids_per_mb: Sequence[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[list[tuple[int, list[int]]], list[int], list[int]]:
    """Fill packs of at most ``max_tokens`` tokens.

    Args:
        seqlens: tokens of each sequence.
        sequence_ids_per_mb: number of each sequence in the packs; None: its index in ``seqlens``.
        min_batch_size, max_batch_size: limits on sequences per pack; a pack full with fewer is dropped.
        sequence_picking_order: dataloader (as given), random (by ``seed``; None: 0), seqlen (short ones first).
        effective_batch_size: packs of a batch; packs that do not fill a last batch are dropped.
        required_microbatches_of_same_size: all packs of a batch have the same number of sequences.
        verbose: log every batch.

    Returns:
        (index of the batch, numbers of its sequences) per pack; the number of sequences per batch; the longest length
        per batch. ValueError: an invalid argument.
    """
    packs = pack(
        seqlens,
        max_tokens,
        numbers=sequence_ids_per_mb,
        smallest=min_batch_size,
        largest=max_batch_size,
        order=sequence_picking_order,
        per_batch=effective_batch_size,
        equal=required_microbatches_of_same_size,
        seed=seed or 0,
    )
    if verbose:
        _log_packs(packs)
    return list(packs), packs.batch_sizes, packs.longest


def _log_packs(packs: TokenBatches) -> None:
    tokens = packs.units("tokens").reshape(-1, packs.per_batch)
    for number, (size, longest) in enumerate(zip(packs.batch_sizes, packs.longest, strict=True)):
        logger.info(
            f"batch {number}: {size} sequences in {packs.per_batch} packs, {tokens[number].sum()} tokens (at most "
            f"{tokens[number].max()} in a pack), the longest has {longest}"
        )


# The loader ------------------------------------------------------------------------------------------------------


def _pad(required: bool, sample_padding_fn: PadSample | None) -> PadSample | None:
    if required and sample_padding_fn is None:
        raise ValueError("required_microbatches_of_same_seqlen=True needs sample_padding_fn(sample, length)")
    return sample_padding_fn if required else None


def _io_arguments(loader: VariableBatchLoader, pin_memory: bool) -> dict[str, Any]:
    return {
        "dataset": loader.dataset,
        "batch_size": loader.batch_size,
        "pin_memory": pin_memory,
        "data_sampler": loader.data_sampler,
        "collate_fn": loader.collate_fn,
        "num_local_io_workers": loader.num_local_io_workers,
    }


# The learning rate -------------------------------------------------------------------------------------------------


class _Constant:
    """Constant schedule, for an optimizer without one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int | None = None) -> None:
        pass


class VariableBatchSizeLR(LRScheduler):
    """Scales the rates of ``lr_scheduler`` to the size of the next batch.

    Batch i of an epoch has ``batch_sizes[i]`` samples, and epochs repeat. The initial rate is that of the first
    batch; each ``step()`` advances to the next batch. ``step(0)`` returns to the first batch and to the start of the
    schedule.

    Args:
        lr_scheduler: any object with ``optimizer`` and ``step()`` that writes rates into the optimizer's groups.
        base_batch_size: the batch size for which its rates are chosen.
        dataloader: kept, for clients.
        lr_scaling_method: as in `scale_lr`.
        last_epoch: the last trained batch, in a resumed run.
        verbose: log every rate.
    """

    def __init__(
        self,
        lr_scheduler: Any,
        base_batch_size: int,
        batch_sizes: Sequence[int],
        dataloader: Any,
        lr_scaling_method: str | None = "linear",
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not len(batch_sizes):
            raise ValueError(
                "no batch can be filled: there are too few sequences, or max_tokens is too small"
            )
        # Raise for an unknown method now.
        scale_lr(base_batch_size, base_batch_size, method=lr_scaling_method)
        self.base_lr_scheduler = lr_scheduler
        self.base_batch_size, self.batch_sizes = base_batch_size, list(batch_sizes)
        self.dataloader, self.lr_scaling_method, self.verbose = dataloader, lr_scaling_method, verbose
        self.base_lrs: list[Any] = self.get_lr()
        self.unscaled_lrs = self.get_lr()
        """Unscaled rates of the schedule at this batch, one per group."""
        self.last_epoch = last_epoch + 1
        self._step_count = 1  # torch's schedulers count their first rate
        self._scale()

    @property
    def optimizer(self) -> Optimizer:
        return get_torch_optimizer(self.base_lr_scheduler.optimizer)

    def get_lr(self) -> list[float]:
        """Return the current rates, one per group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        return self.get_lr()

    def _scale(self) -> None:
        size = self.batch_sizes[self.last_epoch % len(self.batch_sizes)]
        update_lr(
            self.optimizer.param_groups,
            [scale_lr(self.base_batch_size, size, lr, self.lr_scaling_method) for lr in self.unscaled_lrs],
        )
        if self.verbose:
            logger.info(
                f"batch {self.last_epoch} of {size} samples: learning rates {self.get_lr()} (for "
                f"{self.base_batch_size} samples {self.unscaled_lrs})"
            )

    def step(self, epoch: int | None = None) -> None:
        """Advance to the next batch, or to batch ``epoch``."""
        update_lr(self.optimizer.param_groups, self.base_lrs if epoch == 0 else self.unscaled_lrs)
        if epoch is None:
            self.base_lr_scheduler.step()
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The epoch parameter in `scheduler.step", UserWarning)
                self.base_lr_scheduler.step(epoch)
        self.unscaled_lrs = self.get_lr()
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._step_count += 1
        self._scale()

    def skip(self) -> None:
        """Advance to the next batch without advancing the schedule, after a skipped update (fp16)."""
        self.last_epoch += 1
        self._scale()

    def state_dict(self) -> dict[str, Any]:
        return {
            "base_lr_scheduler": state_of(self.base_lr_scheduler),
            "base_batch_size": self.base_batch_size,
            "lr_scaling_method": self.lr_scaling_method,
            "batch_sizes": self.batch_sizes,
            "base_lrs": self.base_lrs,
            "unscaled_lrs": self.unscaled_lrs,
            "last_epoch": self.last_epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state. ``batch_sizes`` stay those of this run, like the loader's batches."""
        if state_dict["batch_sizes"] != self.batch_sizes:
            logger.warning(
                f"the learning rate was saved with different batches ({len(state_dict['batch_sizes'])} of "
                f"them, now {len(self.batch_sizes)}): it resumes by the number of trained batches"
            )
        if isinstance(self.base_lr_scheduler, LoadsStateDict) and state_dict["base_lr_scheduler"] is not None:
            self.base_lr_scheduler.load_state_dict(state_dict["base_lr_scheduler"])
        self.base_lrs, self.unscaled_lrs = list(state_dict["base_lrs"]), list(state_dict["unscaled_lrs"])
        self.last_epoch = state_dict["last_epoch"]
        self._scale()


def lr_scheduler_for_variable_batch_size(
    base_batch_size: int,
    batch_sizes: Sequence[int],
    dataloader: Any,
    lr_scheduler_or_optimizer: Any,
    lr_scaling_method: str | None = "linear",
    verbose: bool = False,
) -> VariableBatchSizeLR:
    """Make a schedule that scales the rates of a schedule, or of an optimizer, to batch sizes. TypeError: it is
    neither."""
    found = lr_scheduler_or_optimizer
    if not hasattr(found, "step") or not (hasattr(found, "optimizer") or hasattr(found, "param_groups")):
        raise TypeError(f"{type(found).__name__} is neither a learning-rate schedule nor an optimizer")
    base = _Constant(get_torch_optimizer(found)) if hasattr(found, "param_groups") else found
    return VariableBatchSizeLR(
        base, base_batch_size, batch_sizes, dataloader, lr_scaling_method, verbose=verbose
    )


# Both ------------------------------------------------------------------------------------------------------------


def get_dataloader_and_lr_scheduler_for_variable_batch_size(
    dataset: Any,
    dataset_seqlens: Any,
    max_tokens: int,
    effective_batch_size: int,
    dataset_filter_ids: Sequence[int] | None = None,
    lr_scaling_method: str | None = "linear",
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    dataloader_batch_size: int = 1,
    dataloader_rank: int = 0,
    dataloader_num_replicas: int = 1,
    dataloader_num_workers: int = 0,
    dataloader_collate_fn: Collate | None = None,
    dataloader_pin_memory: bool = False,
    lr_scheduler_or_optimizer: Any = None,
    required_microbatches_of_same_size: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: PadSample | None = None,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[VariableBatchLoader, VariableBatchSizeLR | None, dict[str, Any]]:
    """Return loader, schedule (None without ``lr_scheduler_or_optimizer``), arguments for ``engine.deepspeed_io``.

    Args:
        dataset_seqlens: tokens of each sample of ``dataset``, or of each one in ``dataset_filter_ids``.
        effective_batch_size: packs of a batch on all ranks, and the batch size for which rates are chosen.
        dataset_filter_ids: the samples to use; None: all.
        dataloader_batch_size: packs of a micro-batch; ranks take them in turn.
        sample_padding_fn: pads a sample to a length, for micro-batches of equal sequence length.

    Others: as in `batch_by_seqlens` and `lr_scheduler_for_variable_batch_size`. Multiply the mean loss of the last
    micro-batch by ``loader.loss_weight`` to weight all samples of a batch equally.

    Raises:
        ValueError: an invalid argument, or no batch can be filled.
    """
    packs = _packs(
        dataset_seqlens,
        dataset_filter_ids,
        max_tokens=max_tokens,
        smallest=min_batch_size,
        largest=max_batch_size,
        order=sequence_picking_order,
        per_batch=effective_batch_size,
        equal=required_microbatches_of_same_size,
        seed=seed or 0,
        verbose=verbose,
    )
    loader = VariableBatchLoader(
        dataset,
        packs,
        packs_per_step=dataloader_batch_size,
        world_size=dataloader_num_replicas,
        rank=dataloader_rank,
        pad=_pad(required_microbatches_of_same_seqlen, sample_padding_fn),
        collate_fn=dataloader_collate_fn,
        num_workers=dataloader_num_workers,
        pin_memory=dataloader_pin_memory,
        weighting="samples",
    )
    scheduler = None
    if (given := lr_scheduler_or_optimizer) is not None:
        scheduler = lr_scheduler_for_variable_batch_size(
            effective_batch_size, packs.batch_sizes, loader, given, lr_scaling_method, verbose
        )
    return loader, scheduler, _io_arguments(loader, dataloader_pin_memory)


def _packs(lengths: Any, chosen: Sequence[int] | None, *, verbose: bool, **options: Any) -> TokenBatches:
    lengths = np.asarray(lengths).reshape(-1)
    if chosen is not None:
        numbers = np.asarray(chosen, dtype=np.int64)
        if len(numbers) and len(lengths) > numbers.max():  # lengths of the whole data set
            lengths = lengths[numbers]
        options["numbers"] = numbers
    packs = pack(lengths, **options)
    if not len(packs):
        raise ValueError(
            f"{len(lengths)} sequences do not fill one batch of {options['per_batch']} packs of at most "
            f"{options['max_tokens']} tokens: lower train_batch_size, max_tokens or min_batch_size"
        )
    if verbose:
        _log_packs(packs)
    return packs


# For an engine -----------------------------------------------------------------------------------------------------


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Any,
    dataset_seqlens: Any = None,
    dataset_filter_ids: Sequence[int] | None = None,
    dataloader_collate_fn: Collate | None = None,
    sample_padding_fn: PadSample | None = None,
    batch_seqlens_fn: Callable[[Any], Any] | None = None,
) -> tuple[VariableBatchLoader, VariableBatchSizeLR | None, dict[str, Any]]:
    """Set the loader and the schedule of ``engine`` by its section ``dynamic_batching``; return both, and arguments
    for ``engine.deepspeed_io``.

    Args:
        dataset_seqlens: tokens of each sample; None: read from ``metrics_path``, or counted if absent: by
            ``batch_seqlens_fn`` on batches of ``dataloader_collate_fn``, or from the samples.
        dataset_filter_ids: the samples to use; None: all.
        sample_padding_fn: (sample, length) -> padded sample. In a pipeline all samples of a batch are padded to the
            longest in it.
    """
    loader = engine_loader(
        engine,
        dataset,
        lengths=dataset_seqlens,
        chosen=dataset_filter_ids,
        collate_fn=dataloader_collate_fn,
        pad=sample_padding_fn,
        batch_lengths=batch_seqlens_fn,
    )
    engine.training_dataloader = loader
    attach(engine, loader)
    scheduler = engine.lr_scheduler if isinstance(engine.lr_scheduler, VariableBatchSizeLR) else None
    return loader, scheduler, _io_arguments(loader, loader.pin_memory)


def engine_loader(
    engine: Any,
    dataset: Any,
    *,
    collate_fn: Collate | None,
    lengths: Any = None,
    chosen: Sequence[int] | None = None,
    pad: PadSample | None = None,
    batch_lengths: Callable[[Any], Any] | None = None,
) -> VariableBatchLoader:
    """Return the loader configured for ``engine``. ValueError: the config does not fit the data set."""
    sampling = engine._config.data_efficiency_config["data_sampling"]
    section = sampling["dynamic_batching"]
    pipelined = reads_batches(engine)
    _check_section(section, dataset, pipelined=pipelined)
    if lengths is None:
        lengths = sequence_lengths(dataset, section["metrics_path"], batch_lengths, collate_fn)
    packs = _packs(
        lengths,
        chosen,
        max_tokens=section["max_tokens"],
        smallest=section["min_batch_size"],
        largest=section["max_batch_size"],
        order=section["sequence_picking_order"],
        per_batch=engine.train_batch_size(),
        equal=pipelined,
        seed=engine._config.data_efficiency_config["seed"],
        verbose=section["verbose"],
    )
    return VariableBatchLoader(
        dataset,
        packs,
        packs_per_step=engine.train_micro_batch_size_per_gpu(),
        world_size=engine.mesh.size("dp"),
        rank=engine.mesh.rank("dp"),
        pad=pad if pipelined else None,
        collate_fn=collate_fn,
        num_workers=sampling["num_workers"],
        pin_memory=sampling["pin_memory"],
        tput_timer=getattr(engine, "tput_timer", None),
        weighting=section["loss_weighting"],
    )


def _check_section(section: Mapping[str, Any], dataset: Any, *, pipelined: bool) -> None:
    if section["max_tokens"] is None:
        raise ValueError("data_efficiency.data_sampling.dynamic_batching.max_tokens is missing")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            "data_efficiency.data_sampling.dynamic_batching needs a map-style data set with a length, not "
            f"{type(dataset).__name__}"
        )
    weighting = section["loss_weighting"]
    if pipelined and weighting not in ("samples", "none"):
        raise ValueError(
            f"dynamic_batching.loss_weighting={weighting!r} is not supported with a pipeline, whose "
            "micro-batches have equal weight: use samples"
        )


def attach(engine: Any, loader: VariableBatchLoader) -> None:
    """Make the learning rate and the loss weights of ``engine`` follow the batches of ``loader``."""
    section = engine._config.data_efficiency_config["data_sampling"]["dynamic_batching"]
    base = engine.lr_scheduler
    if isinstance(base, VariableBatchSizeLR):  # attached for another loader
        update_lr(base.optimizer.param_groups, base.unscaled_lrs)
        base = base.base_lr_scheduler
    scheduler = None
    if base is not None or engine.basic_optimizer is not None:
        scheduler = lr_scheduler_for_variable_batch_size(
            loader.per_batch,
            loader.batch_sizes,
            loader,
            base if base is not None else engine.basic_optimizer,
            section["lr_scaling_method"],
            section["verbose"],
        )
        engine.lr_scheduler = scheduler
    BatchFollower(engine, loader, scheduler)


# Weights of micro-batches during training.


def reads_batches(engine: Any) -> bool:
    """Return whether the engine is a pipeline engine, which reads whole batches itself."""
    return hasattr(type(engine), "train_batch")


class BatchFollower:
    """Loss weights of ``engine``, in the order in which ``loader`` yielded the micro-batches.

    Micro-batches may be read ahead. One ends with ``engine.step()``; after an exception all yielded ones are dropped,
    as the engine drops their gradients.
    """

    def __init__(self, engine: Any, loader: VariableBatchLoader, scheduler: Any) -> None:
        self.engine, self.loader, self.scheduler = engine, loader, scheduler
        self._updates = engine.global_steps
        if isinstance(engine.loss_weight, BatchFollower):
            engine.loss_weight.leave()
        engine.loss_weight = self
        if not reads_batches(engine):  # in a pipeline all micro-batches count equally
            loader.keep_weights()
        self._subscribed = (("after_step", self._end), ("on_error", self._drop), ("on_load", self._resume))
        for event, subscriber in self._subscribed:
            engine.events.on(event, subscriber)

    def leave(self) -> None:
        for event, subscriber in self._subscribed:
            self.engine.events.off(event, subscriber)

    def __call__(self) -> float:
        """Return the weight of the current micro-batch; 1 for data from another source."""
        if not self.loader.to_train:
            return 1.0
        if self.engine.train_batch_size() != self.loader.per_batch:
            raise ValueError(
                f"train_batch_size={self.engine.train_batch_size()} was set after batches of "
                f"{self.loader.per_batch} packs were made: recreate the loader"
            )
        return self.loader.to_train[0]

    def _end(self, **_: Any) -> None:
        if self.loader.to_train:
            self.loader.to_train.popleft()
        updated = self.engine.global_steps != self._updates
        self._updates = self.engine.global_steps
        if updated and self.scheduler is not None and not self.engine.was_step_applied():
            self.scheduler.skip()

    def _drop(self, **_: Any) -> None:
        self.loader.forget_weights()

    def _resume(self, **_: Any) -> None:
        self._updates = self.engine.global_steps
