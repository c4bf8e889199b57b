"""The state of an engine between steps: ``engine.checkpoints`` saves, loads and exports it, ``engine.moves`` offloads
it."""

from __future__ import annotations

import gc
import glob
import os
from collections.abc import Callable, Container, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deepspeed.config.sections.offload import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.engine.observers.progress.start_report import reporter
from deepspeed.zero.offload.state_moves import HasMovableStates

if TYPE_CHECKING:
    from types import ModuleType

    from deepspeed.checkpoint.files.background import BackgroundWriter
    from deepspeed.checkpoint.remote.mirror import Mirror
    from deepspeed.engine.interface import Engine

# Imports are made by the first call that needs them: many runs save at the end, or never.


def _saving() -> ModuleType:
    from deepspeed.engine import saving

    return saving


def _weights() -> ModuleType:
    from deepspeed.engine import weights

    return weights


class Checkpoints:
    """Saves, loads and exports, through ``saving.py``, ``loading.py`` and ``weights.py``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mirrors: dict[str, Mirror] = {}

    def mirror(self, folder: str | os.PathLike[str]) -> Mirror | None:
        """Return the mirror of a URL's checkpoints; None if ``folder`` is a local folder."""
        from deepspeed.checkpoint.names import is_url

        if not is_url(url := os.fspath(folder)):
            return None
        if url not in self._mirrors:
            from deepspeed.checkpoint.remote.mirror import Mirror

            self._mirrors[url] = Mirror(url, self._engine._config.checkpoint_config.staging_folder)
        return self._mirrors[url]

    def new_writer(self) -> BackgroundWriter | None:
        """Make the background writer of checkpoints; None if not configured."""
        config = self._engine._config
        writer = config.checkpoint_config.writer
        if (writer is None or not writer.decoupled) and config.datastates_config is False:
            return None
        return _saving().new_background_writer(self._engine)

    def wait_until_stored(self) -> None:
        """Return when all saves are on disk and uploaded to their URLs. CheckpointError: something could not be
        stored."""
        from deepspeed.checkpoint.files.flush import wait_for_flushes

        wait_for_flushes()
        for mirror in self._mirrors.values():
            mirror.wait()

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] = {},  # noqa: B006 - the documented default, never written to
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything needed to resume to ``save_dir/tag``. Collective; see ``docs/checkpoints.md``."""
        self._engine.load_guard.refuse()
        done = _saving().save_checkpoint(
            self._engine,
            save_dir,
            tag,
            client_state,
            save_latest,
            exclude_frozen_parameters,
            mirror=self.mirror(save_dir) if save_dir else None,
        )
        self._engine.events.emit("on_save", save_dir=save_dir, tag=tag)
        return done

    def _change_recovery_script_permissions(self, dst: str) -> None:
        """Make the script at ``dst`` executable, if the file system has permissions."""
        from deepspeed.checkpoint.files.writers import set_mode

        set_mode(Path(dst), 0o744)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint; return ``(path, client_state)``, or ``(None, None)`` if there is none. Collective."""
        from deepspeed.engine.loading import load_checkpoint  # imports the readers of all formats

        folder = load_dir
        if (mirror := self.mirror(load_dir)) is not None:
            folder = str(mirror.local)
            self._fetch(mirror, tag)
        result = load_checkpoint(
            self._engine,
            folder,
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )
        self._engine.events.emit("on_load", load_dir=load_dir, tag=tag)
        if result[0] is not None:
            reporter(self._engine)(f"loaded {result[0]}; now at step {self._engine.global_steps}")
        return result

    def _fetch(self, mirror: Mirror, tag: str | None) -> None:
        """Download a checkpoint to each machine, after pending saves and uploads have finished. Collective."""
        from deepspeed.checkpoint.ranks import Ranks

        if self._engine.background_writer is not None:
            self._engine.background_writer.wait()
        ranks = Ranks(node_local=True)
        with ranks.together("fetching the checkpoint"):
            if ranks.keeps_folder:
                mirror.finish_uploads()
                mirror.fetch(tag)

    @cached_property
    def save_non_zero_checkpoint(self) -> bool:
        """Return whether this rank writes a file of model states. Scripts that write files themselves set it."""
        return _saving().writes_model_file(self._engine)

    @cached_property
    def save_zero_checkpoint(self) -> bool:
        """Return whether this rank writes a file with its part of the optimizer state."""
        return bool(self._engine._config.zero_enabled) and self._engine.core is not None

    def _get_ckpt_name(
        self, checkpoints_path: str | os.PathLike[str], tag: str, mp_placeholder: str | None = None
    ) -> str:
        """Return the path of this rank's model states; ``mp_placeholder`` replaces its model-parallel rank (``"*"``:
        a pattern for all)."""
        place = None if mp_placeholder is None else str(mp_placeholder)
        return _saving().model_path(self._engine, checkpoints_path, tag, place)

    def _get_all_ckpt_names(self, checkpoints_path: str | os.PathLike[str], tag: str) -> list[str]:
        """Return the paths of the model states of all model-parallel ranks, in rank order."""
        from deepspeed.checkpoint import names

        return names.by_rank(
            glob.glob(self._engine._get_ckpt_name(checkpoints_path, tag, mp_placeholder="*"))
        )

    def _get_zero_ckpt_name(self, checkpoints_path: str | os.PathLike[str], tag: str) -> str:
        """Return the path of this rank's optimizer states."""
        return _saving().optimizer_path(self._engine, checkpoints_path, tag)

    def _get_optimizer_ckpt_name(
        self, checkpoints_path: str | os.PathLike[str], tag: str, expp_rank: int
    ) -> str:
        """Return the same path for any ``expp_rank``: experts' states are in the same file."""
        return _saving().optimizer_path(self._engine, checkpoints_path, tag)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the model's weights in their own dtype, from rank 0."""
        self._engine.load_guard.refuse()
        return _weights().save_16bit_model(self._engine, save_dir, save_filename, exclude_frozen_parameters)

    def save_fp16_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        return self._engine.save_16bit_model(save_dir, save_filename)  # a trainer may have replaced it

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """Return the whole model on rank 0's host, None on the others. Collective. ValueError if the stage is not 3.

        ``stage3_gather_16bit_weights_on_model_save`` is ignored: it applies to saving a model, while scripts that call
        this always want the weights.
        """
        from deepspeed.checkpoint.sharded_weights import ShardedWeights

        if not ShardedWeights(self._engine.module):
            raise ValueError("the parameters are not partitioned: use engine.module.state_dict()")
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """Return the whole model on rank 0, None on the others, at any stage. Collective."""
        return _weights().consolidated_16bit_state_dict(self._engine, exclude_frozen_parameters)

    def layer_writer(self, exclude_frozen: bool) -> Callable[[Path, Mapping[str, Any]], None] | None:
        """Return the function that writes per-layer files of a save: here those of experts, if weights are whole
        (stages 0 to 2); None if there are none."""
        engine = self._engine
        if not engine.num_experts or engine.plan.zero.shard_params:
            return None
        return partial(self.write_experts, exclude_frozen=exclude_frozen)

    def write_experts(self, folder: Path, save: Mapping[str, Any], *, exclude_frozen: bool) -> None:
        """Write the file of each expert of which this rank is the first holder. ``save``: the id of the save."""
        from deepspeed.checkpoint.save_ids import marked
        from deepspeed.parallel.expert.placement import write_experts

        engine, files = self._engine, self._engine.checkpoint_engine
        write_experts(
            engine.module,
            engine.mesh,
            lambda state, name: files.save(marked(state, save), str(folder / name)),
            exclude_frozen,
        )
        if info := files.get_commit_info():
            files.commit(info)  # all files are in the folder before it is committed

    def of_all_stages(self, weights: Any) -> Any:
        """Return ``weights`` of this rank's module, in a pipeline with those of the other stages, for an export."""
        return weights

    def whole_tensor(self, param: Tensor, value: Tensor | None = None) -> Tensor:
        """Return the global tensor of ``param`` [shape before tensor parallelism; experts are stacked along a new
        first dim], on every rank, detached. ``value``: a tensor with the placement of ``param``, such as
        ``safe_get_full_grad(param)``, to use instead of the weights. Collective."""
        return _weights().whole(self._engine, param, value)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the ``state_dict`` of the wrapped, transformed module; without frozen parameters if requested."""
        module = self._engine.module
        state = module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Load ``checkpoint["module"]``; the optimizer's master weights follow.

        ``allowed_missing_keys`` may be absent even if ``strict``. ``fetch_z3_params`` and ``z3_params_to_fetch`` are
        accepted and ignored: sharded parameters are always gathered.
        """
        from deepspeed.checkpoint.sharded_weights import ShardedWeights

        engine, source = self._engine, checkpoint["module"]
        with _weights().gathered(engine, modified=True):
            if custom_load_fn is not None:
                custom_load_fn(src=source, dst=engine.module)
            else:
                own = engine.module.state_dict()
                tolerated = {name: own[name] for name in allowed_missing_keys or () if name in own}
                engine.module.load_state_dict({**tolerated, **source}, strict=strict)
        if engine.state_access is not None and not ShardedWeights(engine.module):
            engine.state_access.weights_loaded()


class StateMoves:
    """Offloads state between steps to free device memory for other uses."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._guards = False

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move training state to host memory until ``reload_states``, to free device memory.

        Args:
            include: kinds to move (values of ``OffloadStateTypeEnum``); default: all of them.
            device: "cpu".
            pin_memory: use pinned memory, from which reloading is faster.
            non_blocking: return before the copies are done; synchronize the device before relying on its memory.

        Raises:
            AssertionError: parameters are already offloaded (``offload_param``), or the engine holds no state.
        """
        optimizer = self._movable_states()
        optimizer.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the state of ``offload_states`` back."""
        self._movable_states().reload_states(non_blocking)

    def empty_partition_cache(self) -> None:
        """Reshard every gathered parameter that is not in use (stage 3)."""
        if self._engine.sharded is not None:
            self._engine.sharded.transitions.reshard_all()

    def collect_python_gc(self) -> int:
        """Collect cyclic garbage now, for ``disable_python_gc``; return the number of objects."""
        return gc.collect()

    def _movable_states(self) -> HasMovableStates:
        optimizer = self._engine.optimizer
        if self._engine.plan.param_offload is not None:
            raise AssertionError("offload_states() cannot be combined with zero_optimization.offload_param")
        if not isinstance(optimizer, HasMovableStates):
            raise AssertionError(
                f"offload_states() moves state held by the engine, but its optimizer is {optimizer!r:.60}: "
                "use ZeRO stage 1, 2 or 3"
            )
        if not self._guards:
            self._guards = True
            for event in ("before_forward", "before_step"):
                self._engine.events.on(event, optimizer.mover.check_not_offloaded)
        return optimizer
