"""The engine's checkpoints: from its attributes to ``deepspeed.checkpoint`` and back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint import names, rng
from deepspeed.checkpoint.background import BackgroundWriter, without_collections
from deepspeed.checkpoint.catalog import Catalog
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.files import Files, Place, Training, shared_names
from deepspeed.checkpoint.flush import wait_for_flushes as wait_for_flushes
from deepspeed.checkpoint.load import Report, Restorer
from deepspeed.checkpoint.needs import needed_shards
from deepspeed.checkpoint.originals import ORIGINALS
from deepspeed.checkpoint.plain_weights import find_plain, find_universal_weights, open_plain
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.reader import OwnStates, materialize, open_checkpoint, read_pending
from deepspeed.checkpoint.save import check_client_state, save
from deepspeed.checkpoint.splits import Wanted
from deepspeed.checkpoint.tags import read_latest
from deepspeed.checkpoint.writers import find_folder
from deepspeed.comm.waiting import all_ranks_come
from deepspeed.config.checkpoint import CheckpointWriterType
from deepspeed.config.hidden import without_secrets
from deepspeed.config.plan import Cadence
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.engine_weights import gathered
from deepspeed.runtime.stateful import Loads, state_of
from deepspeed.utils.logging import log_dist, logger

if TYPE_CHECKING:
    from deepspeed.runtime.engine_base import EngineBase


RANDOM_LTD = "random_ltd"
PARTS = "engine_parts"
"""Key of the index: what observers keep."""


def create_background_writer(engine: EngineBase) -> BackgroundWriter | None:
    """What writes checkpoints while training continues, if the config asks for that. After the first step, when there
    is a state, it fetches the memory for a copy."""
    writer = engine._config.checkpoint_config.writer
    decoupled = writer is not None and writer.decoupled
    if not decoupled and engine._config.datastates_config is False:
        return None
    made = BackgroundWriter()

    def after_step(**_: Any) -> None:
        if engine.global_steps == 0:
            return
        engine.events.off("after_step", after_step)
        ranks = _ranks(engine)
        training = training_of(engine, {}, exclude_frozen=False)
        with suppress(CheckpointError):  # a save will say so
            made.prepare(Files(training, Place.on(engine.mesh, ranks), node_local=ranks.node_local).values)

    engine.events.on("after_step", after_step)
    return made


def model_path(
    engine: EngineBase, folder: str | os.PathLike[str], tag: str, mp_rank: str | None = None
) -> str:
    """The file of the checkpoint ``tag`` with this rank's model states; ``mp_rank``: instead of its own number."""
    place = Place.on(engine.mesh, _ranks(engine))
    partitioned = engine.zero_optimization_partition_weights()
    name = (
        names.zero_model_file(place.dp_rank, place.mp_rank)
        if partitioned
        else names.model_file(place.mp_rank)
    )
    if mp_rank is not None:
        name = name.replace(f"mp_rank_{place.mp_rank:02d}", f"mp_rank_{mp_rank}")
    return os.path.join(folder, str(tag), name)


def optimizer_path(engine: EngineBase, folder: str | os.PathLike[str], tag: str) -> str:
    """The file of the checkpoint ``tag`` with this rank's part of the optimizer's state (stage 0: the model's file)."""
    if not engine.zero_optimization():
        return model_path(engine, folder, tag)
    place = Place.on(engine.mesh, _ranks(engine))
    name = names.optim_file(place.dp_rank, place.mp_rank, bf16=bool(engine.bfloat16_enabled()))
    return os.path.join(folder, str(tag), name)


def writes_model_file(engine: EngineBase) -> bool:
    """Whether this rank writes a file with model states: every rank with parts of the weights, else one for all of
    them (with node-local storage, one of every machine)."""
    return bool(
        engine.zero_optimization_partition_weights() or Place.on(engine.mesh, _ranks(engine)).writes_model
    )


# Saving ----------------------------------------------------------------------------------------------------


def save_checkpoint(
    engine: EngineBase,
    save_dir: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write everything needed to resume to ``save_dir/tag``. Collective; True when it is in place (with a background
    writer: when it is copied).

    ``tag`` defaults to ``global_step{N}``. ``client_state`` is returned by ``load_checkpoint``.
    ValueError: no ``save_dir``; KeyError: ``client_state`` uses a name reserved by the checkpoint;
    CheckpointError: a rank could not write, in which case whatever was saved before is untouched.
    """
    if not save_dir:
        raise ValueError("save_checkpoint needs a folder: save_dir is empty")
    client_state = client_state or {}
    check_client_state(client_state)
    tag = names.default_tag(engine.global_steps) if tag is None else str(tag)
    info = CheckpointCommitInfo(tag=tag, save_dir=str(save_dir), save_latest=save_latest)
    ranks = _ranks(engine)
    settings = engine._config.checkpoint_config
    if settings.writer is not None and settings.writer.type == CheckpointWriterType.MOCK:
        log_dist(f"checkpoint.writer.type is MOCK: {save_dir}/{tag} is not written", ranks=[0])
        return True
    engine.checkpoint_engine.create(info)
    began = time.perf_counter()
    if engine.background_writer is None:
        _save(engine, client_state, Path(save_dir), tag, ranks, save_latest, exclude_frozen_parameters)
    else:
        engine.background_writer.wait()
        with without_collections():
            _save(engine, client_state, Path(save_dir), tag, ranks, save_latest, exclude_frozen_parameters)
    if settings.writer is not None and settings.writer.show_statistics:
        log_dist(f"save_checkpoint {tag}: training waited {time.perf_counter() - began:.3f} s", ranks=[0])
    return engine.checkpoint_engine.commit(info)


def _save(
    engine: EngineBase,
    client_state: Mapping[str, Any],
    save_dir: Path,
    tag: str,
    ranks: Ranks,
    save_latest: bool,
    exclude_frozen: bool,
) -> None:
    training = training_of(engine, client_state, exclude_frozen=exclude_frozen)
    collective = engine.background_writer is None or training.write_layers is not None
    with all_ranks_come("save_checkpoint", f"tag={tag!r}") if collective else nullcontext():
        save(
            training,
            save_dir,
            tag,
            Place.on(engine.mesh, ranks),
            ranks,
            save_latest=save_latest,
            exclude_frozen=exclude_frozen,
            on_tag_mismatch=_tag_validation(engine),
            background=engine.background_writer,
            keep_last=engine._config.checkpoint_config.keep_last,
        )


def training_of(engine: EngineBase, client_state: Mapping[str, Any], *, exclude_frozen: bool) -> Training:
    """What a checkpoint of the engine holds."""
    originals = engine.module_transforms.originals
    return Training(
        module=engine.module,
        state=engine.state_access,
        zero_stage=engine.zero_optimization_stage(),
        bf16=bool(engine.bfloat16_enabled()),
        ds_config=without_secrets(engine._config._param_dict),
        header={
            "lr_scheduler": state_of(engine.lr_scheduler),
            "skipped_steps": engine.skipped_steps,
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "data_sampler": _curriculum(engine),
            RANDOM_LTD: state_of(getattr(engine, "random_ltd_scheduler", None)),
            "sparse_tensor_module_names": sorted(engine.sparse_tensor_module_names),
            **_described(engine.module),
        },
        client_state=client_state,
        positions={
            "micro_steps": engine.micro_steps,
            "accumulation_steps": engine.gradient_accumulation_steps(),
            "accumulated": engine.clock.position,
            "world_size": engine.world_size,
            "fp16": bool(engine.fp16_enabled()),
            "dynamic_loss_scale": bool(engine.dynamic_loss_scale()),
            "optimizer_order": _optimizer_order(engine),
            "sums_gradients": engine.core is None or engine.core.reducer.cadence is not Cadence.NEVER,
            **({ORIGINALS: originals.packed()} if originals is not None else {}),
            **(
                {PARTS: {name: state_of(part) for name, part in engine.parts.items()}} if engine.parts else {}
            ),
        },
        own_state=engine.core.own_state.saved() if engine.core is not None else None,
        rank_state={"random": rng.capture(), "data": state_of(engine.training_dataloader)},
        write_layers=engine.layer_writer(exclude_frozen),
    )


def _curriculum(engine: EngineBase) -> dict[str, Any] | None:
    """The position in a curriculum, under its documented key; what is loaded is the loader's own position."""
    loader = engine.training_dataloader
    return loader.sampler_position() if isinstance(loader, DeepSpeedDataLoader) else None


def _described(module: Any) -> dict[str, Any]:
    """What the model says of how its parameters are split, as a dict or as a method that returns it."""
    found = getattr(module, UNIVERSAL_CHECKPOINT_INFO, None)
    found = found() if callable(found) else found
    return {UNIVERSAL_CHECKPOINT_INFO: dict(found)} if isinstance(found, Mapping) else {}


def _ranks(engine: EngineBase) -> Ranks:
    return Ranks(node_local=bool(engine.use_node_local_storage()))


def _tag_validation(engine: EngineBase) -> str:
    if not engine.checkpoint_tag_validation_enabled():
        return "IGNORE"
    return "FAIL" if engine.checkpoint_tag_validation_fail() else "WARN"


# Loading ---------------------------------------------------------------------------------------------------


@all_ranks_come("load_checkpoint")
def load_checkpoint(
    engine: EngineBase,
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., Any] | None = None,
) -> tuple[str | None, dict[str, Any] | None]:
    """``(folder, client_state)``; ``(None, None)`` and one warning if no tag is given and none is known.
    Collective.

    A checkpoint of any stage, number of ranks and precision can be loaded, including one written by release 0.19.
    Without a ``tag``, ``load_dir`` may also be a model's plain weights (``.safetensors`` or ``.bin``, a file or a
    folder as ``save_pretrained`` writes it): then these are loaded and nothing else, whatever the other options say;
    as of a universal checkpoint that ``hf_to_universal`` made.
    ``load_module_only`` reads no optimizer file and changes nothing but the weights. Random states, data
    position and accumulated gradients are restored when everything is loaded. CheckpointError (a ValueError)
    says which file is missing, damaged or foreign, and what does not match.
    """
    ranks = _ranks(engine)
    if engine.background_writer is not None:
        engine.background_writer.wait()
    tag, plain = _locate(ranks, Path(load_dir), tag, universal=engine.load_universal_checkpoint())
    if tag is None and plain is None:
        return None, None
    if plain is not None:
        load_optimizer_states, load_lr_scheduler_states, load_module_only = False, False, True
    what = _what_to_load(
        engine, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn
    )
    with ranks.together("reading the checkpoint"):
        catalog = _open(engine, what, ranks, Path(load_dir), tag, plain)
        if ranks.keeps_folder:
            catalog.files.check_complete()
    if what.optimizer and engine.core is not None:  # it may have been saved after a parameter was unfrozen
        engine.core.late_params.admit_saved(catalog.trained_names())
    with ranks.together("reading the checkpoint"):
        restorer = Restorer(
            catalog,
            engine.module,
            engine.state_access,
            strict=load_module_strict,
            is_stage=engine.mesh.size("pp") > 1,
        )
        masters = what.masters and bool(catalog.fragments)
        everything = custom_load_fn is not None or restorer.rewrites_names or bool(restorer.nested)
        needed = needed_shards(
            catalog, engine.module, engine.state_access, masters=masters, optimizer=what.optimizer
        )
        catalog.files.fetch(None if everything else needed, prefer=Place.on(engine.mesh, ranks).number)
    with gathered(engine, modified=custom_load_fn is not None), ranks.together("loading the checkpoint"):
        restorer.check_names()
        if custom_load_fn is not None:
            restorer.custom(custom_load_fn)
        elif masters:
            restorer.weights_from_masters()
        else:
            restorer.weights_from_module()
        if custom_load_fn is None:
            restorer.buffers_of_rank(ranks.rank, ranks.size)
        if what.optimizer:
            restorer.optimizer_states()
    if masters:
        engine.state_access.publish()
    if restorer.parts:
        restorer.parts.changed()
    report = restorer.finish()
    with ranks.together("resuming from the checkpoint"):
        _resume(engine, catalog, ranks, what, report)
    log_dist(report.line(catalog), ranks=[0])
    return str(catalog.folder), materialize(catalog.client_state)


def _locate(
    ranks: Ranks, load_dir: Path, tag: str | None, *, universal: bool
) -> tuple[str | None, Path | None]:
    """The tag to load (``_agreed_tag``), and plain weights that are loaded instead: those that ``load_dir`` holds where
    there are no checkpoints, or a universal checkpoint of nothing else."""

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


def _open(
    engine: EngineBase, what: _What, ranks: Ranks, load_dir: Path, tag: str | None, plain: Path | None
) -> Catalog:
    if plain is not None:
        return open_plain(plain, shared_names(engine.module))
    assert tag is not None
    return open_checkpoint(
        find_folder(load_dir, tag),
        optimizer=what.optimizer or what.masters,
        partial=ranks.node_local,
        order=_optimizer_order(engine) if what.optimizer else None,
        wanted=Wanted.by(engine.module, engine.mesh.rank("tp"), engine.mesh.size("tp")),
        fetch=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _What:
    """``masters``: weights come from the fp32 masters where there are any. ``everything``: an exact
    resume."""

    masters: bool
    optimizer: bool
    scheduler: bool
    counters: bool
    everything: bool


def _what_to_load(
    engine: EngineBase,
    optimizer: bool,
    scheduler: bool,
    module_only: bool,
    custom: Callable[..., Any] | None,
) -> _What:
    trains = engine.state_access is not None
    optimizer = optimizer and trains and not module_only
    exact = optimizer or bool(engine._config.zero_config.load_from_fp32_weights)
    return _What(
        masters=trains and exact and not module_only and custom is None,
        optimizer=optimizer,
        scheduler=scheduler and not module_only,
        counters=not module_only,
        everything=optimizer and scheduler,
    )


def _agreed_tag(ranks: Ranks, load_dir: Path, tag: str | None, *, universal: bool) -> str | None:
    """The tag to load on all ranks; None, with a warning, if none is given and ``latest`` does not exist. Of a
    ``universal`` checkpoint its own file names it, if there is one: any other loads as well."""
    with ranks.together("looking for the checkpoint"):
        own = str(tag) if tag is not None else None
        if own is None and universal:
            own = read_latest(load_dir, names.LATEST_UNIVERSAL)
        if own is None:
            own = read_latest(load_dir)
    if not ranks.agree(own):
        tags = ranks.gather(own)
        raise CheckpointError(
            f"ranks load different checkpoints from {load_dir}: {', '.join(map(repr, tags[:8]))}; give all of them "
            "one tag and one folder"
        )
    if own is None and ranks.rank == 0:
        logger.warning(
            f"nothing is loaded: {load_dir} has no file named {names.LATEST!r} and no tag was given; pass tag= to load "
            "one that was saved with save_latest=False"
        )
    return own


def _optimizer_order(engine: EngineBase) -> list[list[str]]:
    """Names of the optimizer's parameters by group, in the client's order."""
    known = {id(param): name for param, name in engine.param_names.items()}
    groups = engine.basic_optimizer.param_groups if engine.basic_optimizer is not None else []
    return [[known.get(id(p), "") for p in group["params"]] for group in groups]


def _resume(engine: EngineBase, catalog: Catalog, ranks: Ranks, what: _What, report: Report) -> None:
    """Everything except weights and optimizer state."""
    saved = catalog.model_states
    if what.scheduler and isinstance(engine.lr_scheduler, Loads):
        if saved.get("lr_scheduler") is None:
            report.notes.append("no learning-rate schedule was saved")
        else:
            engine.lr_scheduler.load_state_dict(materialize(saved["lr_scheduler"]))
    if what.counters:
        engine.global_steps = int(saved["global_steps"])
        engine.global_samples = int(
            saved.get("global_samples", engine.global_steps * engine.train_batch_size())
        )
        engine.skipped_steps = int(saved.get("skipped_steps", 0))
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
        schedule = getattr(engine, "random_ltd_scheduler", None)
        if schedule is not None and saved.get(RANDOM_LTD) is not None:
            schedule.load_state_dict(materialize(saved[RANDOM_LTD]))
    if what.optimizer:
        for name, state in catalog.index.get(PARTS, {}).items():
            if name in engine.parts:
                engine.parts[name].load_state_dict(state)
        _load_loss_scale(engine, catalog)
        _load_own_state(engine, catalog, ranks, report)
        _load_accumulation(engine, catalog, ranks, report)
    if what.everything:
        _load_rank_state(engine, catalog, ranks)


def _load_loss_scale(engine: EngineBase, catalog: Catalog) -> None:
    # Our first checkpoints record in the index whether it was dynamic, and do so only for fp16.
    before = bool(catalog.index.get("fp16") and catalog.index.get("dynamic_loss_scale"))
    dynamic = catalog.scalars.get("dynamic", before)
    engine.state_access.load_scalars({**catalog.scalars, "dynamic": dynamic})


def _load_own_state(engine: EngineBase, catalog: Catalog, ranks: Ranks, report: Report) -> None:
    """What ranks do not share, and whether gradients are summed: as every rank reads in the same index."""
    core = engine.core
    if core is None or not core.own_state.takes_part:
        return
    report.notes += core.own_state.load(OwnStates(catalog), ranks.rank, ranks.size)
    if not core.store.traits.own_communication:
        return
    if engine.plan.zero.shard_state:  # copies differ, and each is in slices
        core.executor.publisher.publish()
    sums = catalog.index.get("sums_gradients", True)
    core.reducer.clear()
    core.reducer.change_cadence(engine.plan.zero.cadence if sums else Cadence.NEVER)


def _load_accumulation(engine: EngineBase, catalog: Catalog, ranks: Ranks, report: Report) -> None:
    """Gradients of the micro-batches since the last update, if this run accumulates in the same way."""
    index, state = catalog.index, engine.state_access
    same = (
        index.get("world_size") == engine.world_size
        and index.get("accumulation_steps") == engine.gradient_accumulation_steps()
    )
    state.load_pending_gradients(None)
    if same:
        engine.micro_steps = int(index["micro_steps"])
        engine.clock.position = int(index.get("accumulated", engine.clock.position))
    if not index.get("pending"):
        return
    try:
        if not same:
            raise ValueError("another number of ranks or of accumulation steps")
        pending = read_pending(catalog, ranks.rank)
        state.load_pending_gradients(materialize(pending["pending_gradients"]) if pending else None)
    except (KeyError, IndexError, ValueError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        state.load_pending_gradients(None)
        steps = engine.gradient_accumulation_steps()
        dropped = int(index.get("accumulated", int(index["micro_steps"]) % int(index["accumulation_steps"])))
        engine.micro_steps = int(index["micro_steps"]) // int(index["accumulation_steps"]) * steps
        report.notes.append(f"{dropped} micro-batches since the last update are dropped: {error}")


def _load_rank_state(engine: EngineBase, catalog: Catalog, ranks: Ranks) -> None:
    """Each rank resumes its own random state, if the checkpoint had that rank; data positions are global."""
    number = Place.on(engine.mesh, ranks).number
    saved = catalog.files.rank_state(number)
    if saved is None:
        return
    if number < catalog.index["world_size"]:
        rng.restore(saved["random"])
    loader = engine.training_dataloader
    if saved["data"] is not None and isinstance(loader, Loads):
        loader.load_state_dict(materialize(saved["data"]))
