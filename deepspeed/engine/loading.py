"""Loading checkpoints into an engine: weights, optimizer states, and everything needed for an exact resume."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.base import rng
from deepspeed.base.logging import log_dist, logger
from deepspeed.base.stateful import LoadsStateDict
from deepspeed.checkpoint import names
from deepspeed.checkpoint.catalog import Catalog
from deepspeed.checkpoint.contents import RankCoordinates
from deepspeed.checkpoint.errors import CheckpointError, malformed_as_errors
from deepspeed.checkpoint.files.tags import given_tag, read_latest
from deepspeed.checkpoint.files.writers import find_folder
from deepspeed.checkpoint.foreign.plain_weights import find_plain, find_universal_weights, open_plain
from deepspeed.checkpoint.foreign.splits import WantedParts
from deepspeed.checkpoint.load import LoadReport, Restorer
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.reader import SavedRankStates, materialize, open_checkpoint, read_pending
from deepspeed.comm import CommunicationError
from deepspeed.comm.hangs.stragglers import awaiting_all_ranks
from deepspeed.config.plan import Cadence
from deepspeed.engine.saving import OBSERVER_STATES, RANDOM_LTD, optimizer_order, ranks_of
from deepspeed.engine.weights import gathered

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine


@awaiting_all_ranks("load_checkpoint")
def load_checkpoint(
    engine: Engine,
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., Any] | None = None,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load a checkpoint; return ``(folder, client_state)``, or ``(None, None)`` and a warning if no tag is given and
    ``latest`` does not exist. Collective.

    A checkpoint of any stage, world size and precision can be loaded, including one written by release 0.19. Without a
    ``tag``, ``load_dir`` may also be a model's plain weights (``.safetensors`` or ``.bin``, a file or a folder as
    written by ``save_pretrained``; a state dict in a ``.pt`` or ``.pth`` file): then only these are loaded, regardless
    of the other options; likewise for a universal checkpoint made by ``hf_to_universal``. ``load_module_only`` changes
    only the weights; for 16-bit weights it reads the fp32 masters from the optimizer files, if possible; otherwise it
    does not open these. RNG states, data position and accumulated gradients are restored only by a full load.
    CheckpointError (a ValueError) names the file that is missing, damaged or foreign, or the mismatch.
    """
    ranks = ranks_of(engine)
    if engine.background_writer is not None:
        engine.background_writer.wait()
    tag, plain = _locate(ranks, Path(load_dir), tag, universal=engine._config.load_universal_checkpoint)
    if tag is None and plain is None:
        return None, None
    if plain is not None:
        load_optimizer_states, load_lr_scheduler_states, load_module_only = False, False, True
    selection = _selection_of(
        engine, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn
    )
    call = _LoadCall(ranks, Path(load_dir), tag, plain, load_module_strict, custom_load_fn)
    catalog = _open(engine, selection, call)
    notes: list[str] = []
    if load_module_only and _saved_in_16_bits(engine, catalog, call):
        try:
            precise = replace(selection, masters=True)
            return _load(engine, _open(engine, precise, call), precise, call)
        except CommunicationError:
            raise
        except Exception as error:  # on every rank, due to ``Ranks.together``
            notes = [f"the weights are in {_dtypes(catalog)}: the fp32 ones could not be read ({error})"]
    return _load(engine, catalog, selection, call, notes)


def _load(
    engine: Engine, catalog: Catalog, selection: _Selection, call: _LoadCall, notes: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Load from an open catalog. All checks that need no write come first; if a later step fails, the engine refuses
    to train until a load succeeds. Collective."""
    ranks = call.ranks
    if selection.optimizer and engine.core is not None:  # parameters may have been unfrozen before the save
        with _malformed_as_errors(catalog):
            trained = catalog.trained_names()
        engine.core.pending_params.admit_saved(trained)
    with ranks.together("reading the checkpoint"), _malformed_as_errors(catalog):
        selection = replace(selection, masters=selection.masters and bool(catalog.fragments))
        restorer = Restorer(
            catalog,
            engine.module,
            engine.state_access,
            strict=call.strict,
            is_stage=engine.mesh.size("pp") > 1,
        )
        _fetch(engine, restorer, selection, ranks, everything=call.custom is not None)
        restorer.check_names()
        if selection.optimizer and engine.core is not None:
            restorer.check_states()
    if not (call.strict or call.custom or restorer.rewrites_names or restorer.nested):
        _check_common_parameters(restorer, ranks)
    with engine.load_guard.until_loaded(catalog.folder, optimizer=selection.optimizer):
        _restore(engine, restorer, selection, ranks, call.custom)
        report = restorer.finish()
        report.notes += notes
        with ranks.together("resuming from the checkpoint"):
            _restore_progress(engine, catalog, ranks, selection, report)
    # Each pipeline stage reports what it restored; among replicas, only the pipeline that contains rank 0.
    stages = engine.mesh.ranks("pp")
    log_dist(report.line(catalog), ranks=stages if stages[0] == 0 else [0])
    return str(catalog.folder), materialize(catalog.client_state)


def _check_common_parameters(restorer: Restorer, ranks: Ranks) -> None:
    """Refuse a checkpoint that has no parameter in common with the model. Collective."""
    catalog = restorer.catalog
    own = [name for name, _ in restorer.module.named_parameters(remove_duplicate=False)]
    found = sum(catalog.find([name]) is not None for name in own)
    loaded, expected = ranks.any_each([found, len(own)])
    if loaded or not expected:
        return
    saved = sorted({*catalog.module, *catalog.fragments})
    raise CheckpointError(
        f"nothing was loaded from {catalog.folder}: 0 of the {len(own)} parameters of the model are in it. "
        f"The model has {', '.join(own[:3])}...; the checkpoint has {', '.join(saved[:3])}... Load it into "
        "the saved model, or pass custom_load_fn= to map the tensors"
    )


def _saved_in_16_bits(engine: Engine, catalog: Catalog, call: _LoadCall) -> bool:
    """Return whether the saved weights are 16-bit, so that loading masters would be more precise; the same on all
    ranks."""
    wanted = (
        call.plain is None
        and call.custom is None
        and engine.state_access is not None
        and bool(engine._config.zero_config.load_from_fp32_weights)
    )
    with _malformed_as_errors(catalog):
        trained = catalog.trained_names() or set(catalog.module_dtypes)
    dtypes = {dtype for name, dtype in catalog.module_dtypes.items() if name in trained}
    return call.ranks.any(wanted and any(dtype in (torch.float16, torch.bfloat16) for dtype in dtypes))


def _dtypes(catalog: Catalog) -> str:
    return ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in catalog.module_dtypes.values()}))


def _locate(
    ranks: Ranks, load_dir: Path, tag: str | None, *, universal: bool
) -> tuple[str | None, Path | None]:
    """Return the tag to load (``_agreed_tag``), and the path of plain weights to load instead: those in a
    ``load_dir`` without checkpoints, or a weights-only universal checkpoint."""

    def instead_of_checkpoints() -> Path | None:
        return find_plain(load_dir) if load_dir.is_file() or read_latest(load_dir) is None else None

    plain = _found_by_all(ranks, instead_of_checkpoints) if tag is None else None
    if plain is not None:
        return None, plain
    agreed = _agreed_tag(ranks, load_dir, tag, universal=universal)
    if agreed is None:
        return None, None
    return agreed, _found_by_all(ranks, lambda: find_universal_weights(find_folder(load_dir, agreed)))


def _found_by_all(ranks: Ranks, find: Callable[[], Path | None]) -> Path | None:
    with ranks.together("looking for the checkpoint"):
        found = find()
    return found if not ranks.any(found is None) else None


@dataclass(frozen=True, slots=True)
class _LoadCall:
    """Arguments of ``load_checkpoint``: a ``tag`` in ``load_dir``, or ``plain`` weights."""

    ranks: Ranks
    load_dir: Path
    tag: str | None
    plain: Path | None
    strict: bool
    custom: Callable[..., Any] | None


def _open(engine: Engine, selection: _Selection, call: _LoadCall) -> Catalog:
    """Open the catalog. CheckpointError: files are missing or damaged, or ranks find different saves. Collective."""
    with call.ranks.together("reading the checkpoint"):
        catalog = _catalog(engine, selection, call)
        if call.ranks.keeps_folder:
            with _malformed_as_errors(catalog):
                catalog.files.check_complete()
    save = catalog.index.get(names.SAVE)
    if not call.ranks.agree(save):
        raise CheckpointError(
            f"ranks find different saves in {catalog.folder}: {call.ranks.gather(save)[:8]}. Copy one save to all nodes"
        )
    return catalog


def _catalog(engine: Engine, selection: _Selection, call: _LoadCall) -> Catalog:
    own_names = engine.module.state_dict(keep_vars=True).keys() | engine.param_names.values()
    if call.plain is not None:
        return open_plain(call.plain, engine.module, own_names)
    assert call.tag is not None
    return open_checkpoint(
        find_folder(call.load_dir, call.tag),
        optimizer=selection.optimizer or selection.masters,
        partial=call.ranks.node_local,
        order=optimizer_order(engine) if selection.optimizer else None,
        wanted=WantedParts.by(engine.module, engine.mesh.rank("tp"), engine.mesh.size("tp")),
        fetch=False,
        own_names=own_names,
    )


def _malformed_as_errors(catalog: Catalog) -> AbstractContextManager[None]:
    return malformed_as_errors(catalog.folder, catalog.written_by)


def _fetch(
    engine: Engine, restorer: Restorer, selection: _Selection, ranks: Ranks, *, everything: bool = False
) -> None:
    """Open the files that this rank reads: all of them if the module's own loading code needs the whole state dict."""
    needed = None
    if not (everything or restorer.rewrites_names or restorer.nested):
        needed = restorer.needed_shards(masters=selection.masters, optimizer=selection.optimizer)
    restorer.catalog.files.fetch(needed, prefer=RankCoordinates.on(engine.mesh, ranks).number)


def _restore(
    engine: Engine, restorer: Restorer, selection: _Selection, ranks: Ranks, custom: Callable[..., Any] | None
) -> None:
    """Load weights, buffers and the optimizer's state. Collective."""
    with gathered(engine, modified=custom is not None), ranks.together("loading the checkpoint"):
        if custom is not None:
            restorer.load_custom(custom)
        elif selection.masters:
            restorer.load_weights_from_masters()
        else:
            restorer.load_weights_through_module()
        with _malformed_as_errors(restorer.catalog):
            if custom is None:
                restorer.load_rank_buffers(ranks.rank, ranks.size)
            if selection.optimizer:
                restorer.load_optimizer_states()
    if selection.masters:
        engine.state_access.publish()
    if restorer.sharded_weights:
        restorer.sharded_weights.changed()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """Parts to load. ``masters``: load weights from the fp32 masters if there are any. ``exact_resume``: also
    this rank's RNG states and data position."""

    masters: bool
    optimizer: bool
    scheduler: bool
    counters: bool
    exact_resume: bool


def _selection_of(
    engine: Engine, optimizer: bool, scheduler: bool, module_only: bool, custom: Callable[..., Any] | None
) -> _Selection:
    trains = engine.state_access is not None
    optimizer = optimizer and trains and not module_only
    exact = optimizer or bool(engine._config.zero_config.load_from_fp32_weights)
    return _Selection(
        masters=trains and exact and not module_only and custom is None,
        optimizer=optimizer,
        scheduler=scheduler and not module_only,
        counters=not module_only,
        exact_resume=optimizer and scheduler,
    )


def _agreed_tag(ranks: Ranks, load_dir: Path, tag: str | None, *, universal: bool) -> str | None:
    """Return the tag to load on all ranks; None, with a warning, if none is given and ``latest`` does not exist. With
    ``universal``, ``latest_universal`` takes precedence over ``latest``."""
    with ranks.together("looking for the checkpoint"):
        own = given_tag(tag) if tag is not None else None
        if own is None and universal:
            own = read_latest(load_dir, names.LATEST_UNIVERSAL)
        if own is None:
            own = read_latest(load_dir)
    if not ranks.agree(own):
        tags = ranks.gather(own)
        raise CheckpointError(
            f"ranks load different checkpoints from {load_dir}: {', '.join(map(repr, tags[:8]))}; use the "
            "same tag and folder on all ranks"
        )
    if own is None and ranks.rank == 0:
        lacks = (
            f"nothing was loaded: {load_dir} has no file named {names.LATEST!r} and no tag was given; pass tag= to "
            "load one that was saved with save_latest=False"
        )
        missing = f"nothing was loaded: folder {load_dir} does not exist"
        logger.warning(lacks if load_dir.exists() else missing)
    return own


def _restore_progress(
    engine: Engine, catalog: Catalog, ranks: Ranks, selection: _Selection, report: LoadReport
) -> None:
    """Restore everything except weights and optimizer state."""
    saved = catalog.model_states
    if selection.scheduler and isinstance(engine.lr_scheduler, LoadsStateDict):
        if saved.get("lr_scheduler") is None:
            report.notes.append("no learning-rate schedule was saved")
        else:
            engine.lr_scheduler.load_state_dict(materialize(saved["lr_scheduler"]))
    with _malformed_as_errors(catalog):
        _restore_run_state(engine, catalog, ranks, selection, report)


def _restore_run_state(
    engine: Engine, catalog: Catalog, ranks: Ranks, selection: _Selection, report: LoadReport
) -> None:
    """Restore counters, accumulation clock, observers and data position."""
    saved = catalog.model_states
    if selection.counters:
        engine.global_steps = int(saved["global_steps"])
        engine.global_samples = int(
            saved.get("global_samples", engine.global_steps * engine._config.train_batch_size)
        )
        engine.skipped_steps = int(saved.get("skipped_steps", 0))
        engine.clock.micro_steps = engine.global_steps * engine._config.gradient_accumulation_steps
        if engine.state_access is not None:  # the batch in progress is over
            engine.state_access.load_pending_gradients(None)
        schedule = getattr(engine, "random_ltd_scheduler", None)
        if schedule is not None and saved.get(RANDOM_LTD) is not None:
            schedule.load_state_dict(materialize(saved[RANDOM_LTD]))
    if selection.optimizer:
        for name, state in catalog.index.get(OBSERVER_STATES, {}).items():
            if name in engine.checkpointed_observers:
                engine.checkpointed_observers[name].load_state_dict(state)
        _warn_of_another_batch(engine, catalog)
        _load_loss_scale(engine, catalog)
        _load_own_state(engine, catalog, ranks, report)
        _load_accumulation(engine, catalog, ranks, report)
    if selection.exact_resume:
        _load_rank_state(engine, catalog, ranks)


def _warn_of_another_batch(engine: Engine, catalog: Catalog) -> None:
    batch = engine._config.train_batch_size
    saved = catalog.index.get("train_batch_size", batch)
    if saved != batch:
        text = f"the checkpoint was trained with {saved} samples per update, and goes on with {batch}: a config with "
        text += "train_batch_size, without gradient_accumulation_steps, keeps them on another number of ranks"
        log_dist(text, ranks=[0], level=logging.WARNING)


def _load_loss_scale(engine: Engine, catalog: Catalog) -> None:
    # Early checkpoints of ours record in the index whether it was dynamic, and only for fp16.
    before = bool(catalog.index.get("fp16") and catalog.index.get("dynamic_loss_scale"))
    dynamic = catalog.scalars.get("dynamic", before)
    engine.state_access.load_scalars({**catalog.scalars, "dynamic": dynamic})


def _load_own_state(engine: Engine, catalog: Catalog, ranks: Ranks, report: LoadReport) -> None:
    """Load per-rank optimizer state, and the cadence of gradient sums, which the index records for all ranks."""
    core = engine.core
    if core is None or not core.own_state.takes_part:
        return
    report.notes += core.own_state.load(SavedRankStates(catalog), ranks.rank, ranks.size)
    if not core.store.traits.own_communication:
        return
    if engine.plan.zero.shard_state:  # replicas differ, and each is sharded
        core.executor.publisher.publish()
    sums = catalog.index.get("sums_gradients", True)
    core.reducer.clear()
    core.reducer.change_cadence(core.reducer.usual_cadence if sums else Cadence.NEVER)


def _load_accumulation(engine: Engine, catalog: Catalog, ranks: Ranks, report: LoadReport) -> None:
    """Load the gradients accumulated since the last update, if world size and accumulation steps are unchanged."""
    index, state = catalog.index, engine.state_access
    same = (
        index.get("world_size") == engine.world_size
        and index.get("accumulation_steps") == engine._config.gradient_accumulation_steps
    )
    if same:
        engine.clock.micro_steps = int(index["micro_steps"])
        engine.clock.position = int(index.get("accumulated", engine.clock.position))
    if not index.get("pending"):
        return
    try:
        if not same:
            raise ValueError("a different number of ranks or accumulation steps")
        pending = read_pending(catalog, ranks.rank)
        state.load_pending_gradients(materialize(pending["pending_gradients"]) if pending else None)
    except (KeyError, IndexError, ValueError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        state.load_pending_gradients(None)
        steps = engine._config.gradient_accumulation_steps
        dropped = int(index.get("accumulated", int(index["micro_steps"]) % int(index["accumulation_steps"])))
        engine.clock.micro_steps = int(index["micro_steps"]) // int(index["accumulation_steps"]) * steps
        report.notes.append(f"dropped {dropped} micro-batches since the last update: {error}")


def _load_rank_state(engine: Engine, catalog: Catalog, ranks: Ranks) -> None:
    """Restore this rank's RNG states, if the checkpoint had this rank, and the data position, which is global."""
    number = RankCoordinates.on(engine.mesh, ranks).number
    saved = catalog.files.rank_state(number)
    if saved is None:
        return
    if number < catalog.index["world_size"]:
        rng.restore(saved["random"])
    loader = engine.training_dataloader
    if saved["data"] is not None and isinstance(loader, LoadsStateDict):
        loader.load_state_dict(materialize(saved["data"]))
