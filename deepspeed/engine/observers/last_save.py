"""``checkpoint.save_at_sigterm`` and ``save_before``: a last checkpoint when the job is about to be stopped.

Ranks see a signal, or the time limit, at different moments, but must save after the same step. So after each step
every rank starts an asynchronous max-reduction of its reason to save, and reads the result of the step before, which
is the same on all ranks and already complete: no rank waits for it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from deepspeed import comm as dist
from deepspeed.base.constants import JOB_STARTED, STOP_GRACE_FILE, TIME_IS_UP
from deepspeed.base.logging import log_dist, logger
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.config.sections.checkpoint import SLURM_LIMIT

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine

GRACE_S = 30.0  # default of Slurm and Kubernetes
BYTES_PER_S = 100e6  # a slow disk shared by all ranks of a machine
STEPS_AHEAD = 3  # the current step, the step of the agreement, and the save
TIME, SIGTERM = 1, 2
END_OF_ALLOCATION = "SLURM_JOB_END_TIME"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # in this rank's folder inside its launcher's folder
LAUNCHER_PREFIX = "deepspeed_launch_"


class LastSave:
    """Saves a last checkpoint and exits, on all ranks after the same step."""

    def __init__(self, engine: Engine) -> None:
        settings = engine._config.checkpoint_config
        self.engine = engine
        assert settings.folder is not None  # a rule of the config
        self.folder = settings.folder
        self.ends_at = _deadline(settings.save_before)
        self._last = time.monotonic()
        self._longest = 0.0
        self._signalled = False
        self._process = os.getpid()
        self._before: Any = None
        self._sum: tuple[torch.Tensor, Any] | None = None
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
        self._size = _bytes_of(engine) * ranks_here
        engine.events.on("after_update", self.after_update)
        engine.events.on("on_destroy", self.close)
        if settings.save_at_sigterm and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_sigterm)
            _ask_for_time()

    def after_update(self, **_: Any) -> None:
        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - self._last), now
        reason = self._agreed(self._own_reason())
        if reason:
            self._save_and_end(reason)

    def _own_reason(self) -> int:
        """Return this rank's reason to save now; 0 for none."""
        if self._signalled:
            return SIGTERM
        ahead = STEPS_AHEAD * self._longest + 2 * self._size / BYTES_PER_S
        return TIME if self.ends_at is not None and time.time() + ahead > self.ends_at else 0

    def _agreed(self, own_reason: int) -> int:
        """Return the maximum of the ranks' reasons a step ago; with one rank, the current reason."""
        if self.engine.world_size == 1:
            return own_reason
        before = self._sum
        largest = torch.tensor([own_reason], dtype=torch.int32, device=self.engine.device)
        self._sum = largest, dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True)
        if before is None:
            return 0
        value, work = before
        if work is not None:
            work.wait()
        return int(value.item())

    def _save_and_end(self, reason: int) -> None:
        self.close()
        writer = self.engine.background_writer
        if writer is not None:
            with suppress(CheckpointError):  # the previous save's error was reported; this one may succeed
                writer.wait()
        self.engine.save_checkpoint(self.folder)
        if writer is not None:
            writer.wait()
        self.engine.checkpoints.wait_until_stored()
        code = TIME_IS_UP if reason == TIME else 128 + signal.SIGTERM
        why = "the time limit is near (checkpoint.save_before)" if reason == TIME else "SIGTERM"
        log_dist(
            f"{why}: the state after step {self.engine.global_steps} is in {self.folder}; exiting with code {code}. "
            "checkpoint.resume continues the run",
            ranks=[0],
        )
        raise SystemExit(code)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        # A forked worker; or a second, more urgent request.
        if os.getpid() != self._process or self._signalled:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        self._signalled = True
        logger.warning(f"SIGTERM: the state will be saved to {self.folder}")

    def close(self, **_: Any) -> None:
        """Restore the script's signal handler."""
        if self._sum is not None:
            pending, self._sum = self._sum[1], None
            if pending is not None:
                pending.wait()
        if self._before is not None:
            if not self._signalled:
                signal.signal(signal.SIGTERM, self._before)
            self._before = None


def _deadline(limit: float | str | None) -> float | None:
    """Return the deadline in seconds since the epoch, None without a limit."""
    if limit is None:
        return None
    if limit == SLURM_LIMIT:
        end = os.environ.get(END_OF_ALLOCATION)
        if end is None:
            raise ValueError(
                f"checkpoint.save_before='{SLURM_LIMIT}' needs {END_OF_ALLOCATION} in the environment, set by "
                "Slurm 22.05 and later; write the limit itself, such as '23:50:00'"
            )
        return float(end)
    began = os.environ.get(JOB_STARTED)
    return float(limit) + (float(began) if began else time.time())


def _bytes_of(engine: Engine) -> int:
    """Estimate the bytes that this rank writes."""
    state = engine.state_access
    own = sum(t.nbytes for _, tensors in state.shards() for t in tensors.values()) if state else 0
    weights = sum(param.nbytes for param in engine.module.parameters())
    return 2 * own + weights  # before the first step the optimizer has no moments yet


def _ask_for_time() -> None:
    """Ask our launcher, if there is one, for a longer grace period after SIGTERM."""
    report = os.environ.get(ERROR_FILE)
    if report is None:
        return
    folder = Path(report).parent.parent
    if folder.name.startswith(LAUNCHER_PREFIX):
        (folder / STOP_GRACE_FILE).write_text(str(GRACE_S))
