"""Saving an engine: collects checkpoint content from its attributes, and calls ``deepspeed.checkpoint``.

Loading is in ``loading.py``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.base import rng
from deepspeed.base.logging import log_dist
from deepspeed.base.python_gc import python_gc_manager
from deepspeed.base.stateful import state_of
from deepspeed.checkpoint import names
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.checkpoint.contents import CheckpointFiles, RankCoordinates, StateToSave
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.files.background import BackgroundWriter
from deepspeed.checkpoint.files.tags import given_tag
from deepspeed.checkpoint.originals import ORIGINALS
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.save import SaveRequest, check_client_state, save
from deepspeed.checkpoint.storage import CheckpointCommitInfo
from deepspeed.comm.hangs.stragglers import awaiting_all_ranks
from deepspeed.config.plan import Cadence
from deepspeed.config.redaction import without_secrets
from deepspeed.config.sections.checkpoint import CheckpointWriterType
from deepspeed.data.loader import DeepSpeedDataLoader
from deepspeed.parallel.tensor.metadata import is_split, universal_checkpoint_info

if TYPE_CHECKING:
    from deepspeed.checkpoint.remote.mirror import Mirror
    from deepspeed.engine.interface import Engine


RANDOM_LTD = "random_ltd"
OBSERVER_STATES = "engine_parts"
"""Index key of the observers' state."""


def new_background_writer(engine: Engine) -> BackgroundWriter:
    """Return the background writer. After the first step, once optimizer state exists, it allocates memory for a
    copy."""
    made = BackgroundWriter()

    def after_update(**_: Any) -> None:
        engine.events.off("after_update", after_update)
        ranks = ranks_of(engine)
        to_save = state_to_save(engine, {}, exclude_frozen=False)
        with suppress(CheckpointError):  # the next save reports it
            own = RankCoordinates.on(engine.mesh, ranks)
            made.prepare(CheckpointFiles(to_save, own, node_local=ranks.node_local).values)

    engine.events.on("after_update", after_update)
    return made


def model_path(engine: Engine, folder: str | os.PathLike[str], tag: str, mp_rank: str | None = None) -> str:
    """Return the path of this rank's model states in checkpoint ``tag``; ``mp_rank`` replaces its own number."""
    own = RankCoordinates.on(engine.mesh, ranks_of(engine))
    partitioned = engine.plan.zero.shard_params
    name = names.zero_model_file(own.dp_rank, own.mp_rank) if partitioned else names.model_file(own.mp_rank)
    if mp_rank is not None:
        name = name.replace(f"mp_rank_{own.mp_rank:02d}", f"mp_rank_{mp_rank}")
    return os.path.join(folder, str(tag), name)


def optimizer_path(engine: Engine, folder: str | os.PathLike[str], tag: str) -> str:
    """Return the path of this rank's optimizer states in checkpoint ``tag`` (stage 0: the model's file)."""
    if not engine._config.zero_enabled:
        return model_path(engine, folder, tag)
    own = RankCoordinates.on(engine.mesh, ranks_of(engine))
    name = names.optim_file(own.dp_rank, own.mp_rank, bf16=bool(engine._config.bfloat16_config.enabled))
    return os.path.join(folder, str(tag), name)


def writes_model_file(engine: Engine) -> bool:
    """Return whether this rank writes model states: every rank if weights are sharded, else one rank (with node-local
    storage, one per machine)."""
    return bool(
        engine.plan.zero.shard_params or RankCoordinates.on(engine.mesh, ranks_of(engine)).writes_model
    )


def save_checkpoint(
    engine: Engine,
    save_dir: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
    mirror: Mirror | None = None,
) -> bool:
    """Write everything needed to resume to ``save_dir/tag``. Collective; return True once committed (with a
    background writer: once copied).

    ``mirror``: of ``save_dir`` if it is a URL; then each machine writes its part to a local folder. ``tag`` defaults
    to ``global_step{N}``. ``client_state`` is returned by ``load_checkpoint``. ValueError: no ``save_dir``; KeyError:
    ``client_state`` uses a name reserved by the checkpoint; CheckpointError: a rank could not write; the previous
    checkpoint is then untouched.
    """
    if not save_dir:
        raise ValueError("save_dir is empty: save_checkpoint needs a folder")
    client_state = client_state or {}
    check_client_state(client_state)
    tag = names.default_tag(engine.global_steps) if tag is None else given_tag(tag)
    info = CheckpointCommitInfo(tag=tag, save_dir=str(save_dir), save_latest=save_latest)
    ranks = ranks_of(engine) if mirror is None else Ranks(node_local=True)
    settings = engine._config.checkpoint_config
    if settings.writer is not None and settings.writer.type == CheckpointWriterType.MOCK:
        log_dist(f"checkpoint.writer.type is MOCK: {save_dir}/{tag} is not written", ranks=[0])
        return True
    engine.checkpoint_engine.create(info)
    began = time.perf_counter()
    folder, keep_last, on_commit = Path(save_dir), settings.keep_last, None
    if mirror is not None:
        on_commit = partial(mirror.committed, latest=save_latest, keep_last=keep_last)
        folder, keep_last = mirror.local, None
    request = SaveRequest(
        folder,
        tag,
        RankCoordinates.on(engine.mesh, ranks),
        save_latest=save_latest,
        exclude_frozen=exclude_frozen_parameters,
        on_tag_mismatch=settings.tag_validation,
        keep_last=keep_last,
        on_commit=on_commit,
    )
    background = engine.background_writer
    if background is not None:
        background.wait()
    with python_gc_manager.paused() if background is not None else nullcontext():
        to_save = state_to_save(engine, client_state, exclude_frozen=exclude_frozen_parameters)
        collective = background is None or to_save.write_layers is not None
        with awaiting_all_ranks("save_checkpoint", f"tag={tag!r}") if collective else nullcontext():
            save(to_save, request, ranks, background)
    if settings.writer is not None and settings.writer.show_statistics:
        log_dist(f"save_checkpoint {tag}: training waited {time.perf_counter() - began:.3f} s", ranks=[0])
    return engine.checkpoint_engine.commit(info)


def state_to_save(engine: Engine, client_state: Mapping[str, Any], *, exclude_frozen: bool) -> StateToSave:
    """Collect the content of a checkpoint of the engine."""
    originals = engine.module_transforms.originals
    observers = {name: state_of(part) for name, part in engine.checkpointed_observers.items()}
    return StateToSave(
        module=engine.module,
        state=engine.state_access,
        zero_stage=engine._config.zero_optimization_stage,
        bf16=bool(engine._config.bfloat16_config.enabled),
        ds_config=without_secrets(engine._config._param_dict),
        header={
            "lr_scheduler": state_of(engine.lr_scheduler),
            "skipped_steps": engine.skipped_steps,
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "data_sampler": _curriculum(engine),
            RANDOM_LTD: state_of(getattr(engine, "random_ltd_scheduler", None)),
            "sparse_tensor_module_names": sorted(engine.facts.sparse_tensor_module_names),
            **_described(engine.module),
        },
        client_state=client_state,
        index_entries={
            "micro_steps": engine.clock.micro_steps,
            "accumulation_steps": engine._config.gradient_accumulation_steps,
            "accumulated": engine.clock.position,
            "train_batch_size": engine._config.train_batch_size,
            "world_size": engine.world_size,
            "fp16": bool(engine._config.float16_config.enabled),
            "dynamic_loss_scale": bool(not engine._config.float16_config.loss_scale),
            "optimizer_order": optimizer_order(engine),
            "sums_gradients": engine.core is None or engine.core.reducer.cadence is not Cadence.NEVER,
            **({ORIGINALS: originals.packed()} if originals is not None else {}),
            **({OBSERVER_STATES: observers} if observers else {}),
        },
        own_state=engine.core.own_state.saved() if engine.core is not None else None,
        experts_of_stages=engine.experts_of_stages,
        rank_state={"random": rng.capture(), "data": state_of(engine.training_dataloader)},
        write_layers=engine.layer_writer(exclude_frozen),
    )


def _curriculum(engine: Engine) -> dict[str, Any] | None:
    """Return the sampler's position in a curriculum, for its documented key; loading uses the loader's own position
    instead."""
    loader = engine.training_dataloader
    return loader.sampler_position() if isinstance(loader, DeepSpeedDataLoader) else None


def _described(module: Any) -> dict[str, Any]:
    """Return the model's description of its tensor-parallel cuts: its own dict or method, else derived from
    placements."""
    found = getattr(module, UNIVERSAL_CHECKPOINT_INFO, None)
    found = found() if callable(found) else found
    if found is None and is_split(module):
        found = universal_checkpoint_info(module)
    return {UNIVERSAL_CHECKPOINT_INFO: dict(found)} if isinstance(found, Mapping) else {}


def ranks_of(engine: Engine) -> Ranks:
    return Ranks(node_local=bool(engine._config.use_node_local_storage))


def optimizer_order(engine: Engine) -> list[list[str]]:
    """Return the parameter names of the optimizer's groups, in the client's order."""
    known = {id(param): name for param, name in engine.param_names.items()}
    groups = engine.basic_optimizer.param_groups if engine.basic_optimizer is not None else []
    return [[known.get(id(p), "") for p in group["params"]] for group in groups]
