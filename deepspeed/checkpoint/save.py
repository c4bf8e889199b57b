"""Saving a checkpoint, synchronously or in the background."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from deepspeed.base.logging import logger
from deepspeed.checkpoint import names
from deepspeed.checkpoint.contents import CheckpointFiles, RankCoordinates, StateToSave
from deepspeed.checkpoint.errors import CheckpointError, CheckpointTagError
from deepspeed.checkpoint.files.archive_writer import write_archive, write_errors_at
from deepspeed.checkpoint.files.background import BackgroundWriter, remove_older
from deepspeed.checkpoint.files.flush import flush, flush_later, wait_for_flushes
from deepspeed.checkpoint.files.tags import check_tag
from deepspeed.checkpoint.files.writers import StagedFolder, replace_file, write_latest
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.save_ids import new_id, save_entry
from deepspeed.comm import CommunicationError


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """Describes one save: of ``save_dir/tag``, by a rank at ``coordinates``.

    ``on_tag_mismatch``: "IGNORE", "WARN" or "FAIL" if ranks give different tags; rank 0's is used. ``keep_last``:
    number of checkpoints to keep in the folder. ``on_commit``: called on every rank after the commit, with the final
    folder, the tag and the ranks.
    """

    save_dir: Path
    tag: str
    coordinates: RankCoordinates
    _: KW_ONLY
    save_latest: bool = True
    exclude_frozen: bool = False
    on_tag_mismatch: str = "WARN"
    keep_last: int | None = None
    on_commit: Callable[[Path, str, Ranks], None] | None = None


def save(
    to_save: StateToSave, request: SaveRequest, ranks: Ranks, background: BackgroundWriter | None = None
) -> None:
    """Write a checkpoint atomically: afterwards either all of it is in place, or the previous content. Collective.

    ``to_save``: this rank's state; ``ranks``: the ranks that save. ``background``: return when the state is copied,
    and write it in a thread.

    CheckpointTagError: the tag cannot name a folder, or ranks differ with "FAIL". KeyError: ``client_state`` has a
    reserved key. CheckpointError: ranks save different models or steps, or a write failed on some rank.
    """
    check_client_state(to_save.client_state)
    if background is not None:
        _save_later(to_save, request, ranks, background)
        return
    with ranks.together("writing the checkpoint"):
        wait_for_flushes()
        files = _files_of(to_save, request, ranks)
        files.measure()
    request = _agree((request.tag, request.coordinates.stage, files.signature), request, ranks)
    folder = _prepare_folder(request, ranks)
    replaces = request.keep_last == 1  # the only copy after the commit: flush it first, for power failures
    with _discarded_on_errors(folder, ranks):
        written = _write(files, folder, ranks, flushed=replaces)
        if to_save.write_layers is not None:
            with ranks.together("writing the files of layers"):
                to_save.write_layers(folder.staging, files.save)
                if replaces:
                    flush(folder.staging)
        owned = folder.is_owned
        _commit(folder, request, ranks, flushed=replaces)
        if not owned:  # the owner cannot flush this machine's page cache
            flush_later(folder.final / name for name in written)


def _files_of(to_save: StateToSave, request: SaveRequest, ranks: Ranks) -> CheckpointFiles:
    return CheckpointFiles(
        to_save, request.coordinates, exclude_frozen=request.exclude_frozen, node_local=ranks.node_local
    )


def _save_later(
    to_save: StateToSave, request: SaveRequest, ranks: Ranks, background: BackgroundWriter
) -> None:
    """Copy the state and start the background save. All agreement, errors included, is left to the threads, so that
    every rank sees the same outcome at its next save: nothing here is collective, unless there are per-layer
    files."""
    check_tag(request.tag)
    background.wait()
    folder: StagedFolder | None = None
    save_id: int | None = None
    if to_save.write_layers is not None:
        folder, request, save_id = _with_layers(to_save, request, ranks)
    copied: CheckpointFiles | Exception
    try:
        copied = _files_of(to_save, request, ranks)
        copied.values = background.copy(copied.values)
        if save_id is not None:
            copied.save_number = save_id
    except Exception as error:  # reported to the other ranks by the thread
        copied = error
    background.start(lambda thread_ranks: _save_copied(copied, request, thread_ranks, folder), ranks)


def _with_layers(
    to_save: StateToSave, request: SaveRequest, ranks: Ranks
) -> tuple[StagedFolder, SaveRequest, int]:
    """Write the per-layer files; return the folder, the request with the agreed tag, and the save's id. Collective."""
    assert to_save.write_layers is not None
    request = _agree((request.tag, request.coordinates.stage), request, ranks)
    (save_id,) = ranks.largest([new_id()])
    folder = _prepare_folder(request, ranks)
    with _discarded_on_errors(folder, ranks), ranks.together("writing the files of layers"):
        to_save.write_layers(folder.staging, save_entry(save_id, to_save.header.get("global_steps")))
    return folder, request, save_id


def _save_copied(
    copied: CheckpointFiles | Exception, request: SaveRequest, ranks: Ranks, folder: StagedFolder | None
) -> None:
    """Save copied values in a thread, as ``save`` does; each file is flushed once written. Collective over the
    threads."""
    with _discarded_on_errors(folder, ranks):
        with ranks.together("copying the state"):
            if isinstance(copied, Exception):
                raise copied
        assert isinstance(copied, CheckpointFiles)
        _check_saved_step(copied.saved_step, ranks)
        request = _agree((request.tag, request.coordinates.stage, copied.signature), request, ranks)
    folder = folder or _prepare_folder(request, ranks)
    with _discarded_on_errors(folder, ranks):
        with ranks.together("writing the checkpoint"):
            copied.measure()
        _write(copied, folder, ranks, flushed=True)
        _commit(folder, request, ranks, flushed=True)


def _check_saved_step(saved_step: tuple[Any, Any], ranks: Ranks) -> None:
    """Raise CheckpointError unless all ranks save the same step: background saves are paired by count, so after a
    skipped one a rank would be paired with another step. Collective."""
    if not ranks.agree(saved_step):
        found = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(ranks.gather(saved_step)))
        raise CheckpointError(
            f"ranks save different steps (global_steps and micro_steps; {found}): all ranks must call "
            "save_checkpoint at the same steps"
        )


def _prepare_folder(request: SaveRequest, ranks: Ranks) -> StagedFolder:
    """Make and return an empty folder to write into. Collective."""
    folder = StagedFolder(request.save_dir, request.tag)
    with _discarded_on_errors(folder, ranks):
        with ranks.together("preparing the checkpoint folder"):
            if ranks.keeps_folder:
                folder.prepare()
        if ranks.shares_folder and not ranks.agree(folder.identity()):
            _prepare_separate_folders(folder, ranks)
    return folder


def _prepare_separate_folders(folder: StagedFolder, ranks: Ranks) -> None:
    """Prepare folders that are not rank 0's: temporary folders of Ray Train workers, or local disks. Each gets the
    files of its ranks. Collective.

    Ranks that do not find their folder prepare it: first one rank per path, in case machines share it; then one per
    path and host name; then each rank, as containers may share a host name."""
    path = os.path.realpath(folder.staging)
    for scope in (path, f"{socket.gethostname()}:{path}", str(ranks.rank)):
        reports = ranks.gather((folder.identity(), scope, folder.is_owned))
        prepared = {identity for identity, _, owned in reports if owned}
        unprepared = [other if identity not in prepared else "" for identity, other, _ in reports]
        if not any(unprepared):
            break
        with ranks.together("preparing the checkpoint folder"):
            if unprepared[ranks.rank] and unprepared.index(scope) == ranks.rank:  # the first of its scope
                folder.prepare()
    owners = sum(ranks.gather(folder.is_owned))
    if ranks.rank == 0:
        logger.warning(
            f"ranks save into {owners} folders: {folder.save_dir} of rank 0 is not shared by all. Each "
            "folder gets the files of its ranks: merge them before loading. With "
            "checkpoint.use_node_local_storage, each machine's folder holds all that its ranks load"
        )


@contextmanager
def _discarded_on_errors(folder: StagedFolder | None, ranks: Ranks) -> Iterator[None]:
    """Discard the staging folder, if any, when the block raises: the previous checkpoint stays. Collective in that
    case."""
    try:
        yield
    except CommunicationError:
        if folder is not None:
            folder.abandon()
        raise  # the state of the other ranks is unknown
    except Exception:
        if folder is not None:
            folder.discard()
        ranks.any(False)  # wait until it is removed on all ranks
        raise


def _write(files: CheckpointFiles, folder: StagedFolder, ranks: Ranks, *, flushed: bool) -> list[str]:
    """Write this rank's files and return their names. Collective."""
    files.merge(ranks)
    contents = files.contents(ranks.rank)
    with ranks.together("writing the checkpoint"):
        for name, content in contents.items():
            with write_errors_at(folder.staging / name):
                write_archive(folder.staging / name, content(), checksums=True)
                if flushed:
                    flush(folder.staging / name)
    return list(contents)


def _commit(folder: StagedFolder, request: SaveRequest, ranks: Ranks, *, flushed: bool) -> None:
    """Rename the staging folder, write ``latest``, remove older checkpoints. Collective.

    ``flushed``: wait until it is on disk before older ones are removed."""
    with ranks.together("committing the checkpoint"):
        if folder.is_owned and ranks.rank != 0 and not any(folder.staging.iterdir()):
            folder.discard()  # this machine's ranks have no files
        if folder.is_owned:
            folder.commit()
            _write_conversion_scripts(request.save_dir)
            if request.save_latest:
                write_latest(request.save_dir, request.tag)
            if flushed:
                wait_for_flushes()
            if request.keep_last is not None:
                remove_older(request.save_dir, request.keep_last, _written_at, newest=folder.final)
    if request.on_commit is not None:
        request.on_commit(folder.final, request.tag, ranks)


def _agree(own: tuple[Any, ...], request: SaveRequest, ranks: Ranks) -> SaveRequest:
    """Return the request with the tag that all ranks use. ``own``: this rank's tag, pipeline stage, and parameter
    signature; gathered only if ranks differ. Collective."""
    if ranks.agree(own):
        return request
    reports = ranks.gather(own)
    tag = agreed_tag([report[0] for report in reports], request.on_tag_mismatch)
    if len(own) > 2:
        for stage in range(request.coordinates.stages):
            check_signatures([report[2] for report in reports if report[1] == stage])
    return replace(request, tag=tag)


def _written_at(folder: Path) -> int | None:
    """Return when the last of our files in ``folder`` was written [ns]; None: not a checkpoint. Client files, which
    may be newer, do not count."""
    times = [entry.stat().st_mtime_ns for entry in folder.iterdir() if names.is_ours(entry.name)]
    return max(times, default=None)


def check_client_state(client_state: Mapping[str, Any]) -> None:
    """Raise KeyError if ``client_state`` would overwrite the checkpoint's own keys."""
    taken = sorted(names.RESERVED_KEYS.intersection(client_state))
    if taken:
        raise KeyError(
            f"client_state must not contain {', '.join(map(repr, taken))}: these names are reserved; rename "
            "them, or nest them in a dict under another name"
        )


def agreed_tag(tags: list[str], on_mismatch: str) -> str:
    """Return rank 0's tag. CheckpointTagError: ranks differ and ``on_mismatch`` is "FAIL"."""
    differing = {rank: tag for rank, tag in enumerate(tags) if tag != tags[0]}
    if differing and on_mismatch != "IGNORE":
        rank, tag = next(iter(differing.items()))
        message = (
            f"ranks save under different tags: rank 0 gave {tags[0]!r}, rank {rank} gave {tag!r} "
            f"({len(differing)} of {len(tags)} ranks differ). Tags must not contain anything that differs "
            "between ranks (checkpoint.tag_validation: Ignore, Warn or Fail)"
        )
        if on_mismatch == "FAIL":
            raise CheckpointTagError(message)
        logger.warning(f"{message}; {tags[0]!r} is used")
    return tags[0]


def check_signatures(signatures: list[tuple[int, int] | None]) -> None:
    """Raise CheckpointError unless all ranks train the same number of parameters. A signature is (number of
    parameters, number of elements); None for a rank without training state."""
    counts = [signature[0] if signature is not None else 0 for signature in signatures]
    if len(set(counts)) > 1:
        rank = next(i for i, count in enumerate(counts) if count != counts[0])
        raise CheckpointError(
            f"ranks disagree on the model: rank 0 trains {counts[0]} parameters, rank {rank} trains {counts[rank]}. "
            "All ranks must build the same model and freeze the same parameters."
        )


def _write_conversion_scripts(save_dir: Path) -> None:
    """Put executable ``zero_to_fp32.py`` and ``zero_to_torch.py`` next to the checkpoints."""
    for name in names.SCRIPTS:
        content = resources.files("deepspeed.tools").joinpath(name).read_bytes()
        path = save_dir / name
        if not path.is_file() or path.read_bytes() != content:
            replace_file(path, content, mode=0o744)
