"""`ds plan --calibrate`: short training runs on one rank and on two, to measure this machine."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.numa import available_cores, cpu_name
from deepspeed.planning.activations import shape_of
from deepspeed.planning.request import PlanRequest, answer
from deepspeed.planning.step_time.calibration import Calibration, CalibrationError, CostLine, Steps
from deepspeed.planning.step_time.shapes import build_shape, call_of, is_shape
from deepspeed.planning.step_time.work import flops_by_call
from deepspeed.tools.launcher.ports import find_free
from deepspeed.version import __version__

STAGES = (0, 1, 2, 3)
LIMIT_S = 600.0
BUSY_SPREAD = 0.3

_SET_HERE = (
    "zero_optimization", "train_batch_size", "gradient_accumulation_steps", "steps_per_print",
    "wall_clock_breakdown", "monitor", "autotuning",
)  # fmt: skip
"""Keys and sections of a config that a calibration replaces or drops."""
_ZERO_SET_HERE = ("stage", "offload_optimizer", "offload_param")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """Arguments of a calibration. ``batch``: `module:function` that returns a batch, for the user's own model.
    ``steps``: timed steps per stage, or more if those take less than ``seconds``. ``threads``: per rank; 0: half of the
    cores."""

    model: str
    config: Mapping[str, Any]
    batch: str | None = None
    micro: int = 1
    sequence: int = 256
    stages: Sequence[int] = STAGES
    steps: int = 7
    warmup: int = 3
    seconds: float = 2.0
    threads: int = 0
    python: str = sys.executable


Place = Callable[[int], tuple[list[str], dict[str, str]]]
"""Maps a rank to a prefix of its command line, and to additional environment variables."""


def calibrate(
    request: CalibrationRequest, place: Place | None = None, tell: Callable[[str], None] = print
) -> Calibration:
    """Run the calibration. CalibrationError: it is not possible here, or failed; with the output of the ranks."""
    if not is_shape(request.model) and request.batch is None:
        raise CalibrationError(
            f"--model {request.model}: a calibration trains, so it needs a batch: give --batch "
            "module:function, which returns the model's inputs, or a named shape such as gpt:10m"
        )
    device_type = get_accelerator().device_name().partition(":")[0]
    if device_type != "cpu" and get_accelerator().device_count() < 2:
        raise CalibrationError(f"a calibration needs two devices, found {get_accelerator().device_count()}")
    cores = len(available_cores())
    threads = request.threads or max(1, cores // 2)
    found: dict[str, Any] = {"steps": {}}
    for ranks in (1, 2):
        stages = ", ".join(map(str, request.stages))
        tell(
            f"calibrating: {ranks} rank{'s' * (ranks > 1)}, stages {stages} (a minute or two, more on a busy machine)"
        )
        part = _run(request, ranks, threads, place if ranks > 1 else None, tell)
        found = {**found, **part, "steps": {**found["steps"], **part["steps"]}}
    if (widest := max(row["spread"] for row in found["steps"].values())) > BUSY_SPREAD:
        tell(
            f"warning: step times vary by up to {widest:.0%}: the machine is busy, calibrate again when it is not"
        )
    elements, flops = _model_facts(request)
    lines = {name: CostLine(**line) for name, line in found["lines"].items()}
    lines.setdefault("fetch", lines["all_gather"])
    return Calibration(
        machine=f"{cpu_name()}, {cores} cores, torch {torch.__version__}",
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        release=__version__,
        device_type=device_type,
        cores=cores,
        threads=threads,
        model=request.model,
        elements=elements,
        tokens=request.micro * request.sequence,
        precision=_precision(request.config),
        flops=flops,
        forward_share=found["shares"][0],
        backward_share=found["shares"][1],
        steps={key: Steps(**row) for key, row in found["steps"].items()},
        lines=lines,
    )


def _precision(config: Mapping[str, Any]) -> str:
    for name in ("bf16", "fp16"):
        if isinstance(config.get(name), Mapping) and config[name].get("enabled"):
            return name
    return "fp32"


def _model_facts(request: CalibrationRequest) -> tuple[int, float]:
    """Return the trained elements, and the FLOPs of a forward."""
    with torch.device("meta"):
        module = build_shape(request.model) if is_shape(request.model) else call_of(request.model)()
    config = {"train_micro_batch_size_per_gpu": request.micro, **request.config}
    planned = answer(PlanRequest(module=module, config=config, ranks=1, device_type="cpu"))
    model = planned.setting.model
    flops = flops_by_call(
        module,
        model,
        request.micro * request.sequence,
        request.sequence,
        shape_of(getattr(module, "config", None)),
    )
    return sum(spec.numel for spec in model.specs[: model.trained]), sum(flops)


# The ranks ---------------------------------------------------------------------------------------------------


def _run(
    request: CalibrationRequest, ranks: int, threads: int, place: Place | None, tell: Any
) -> dict[str, Any]:
    config = {key: value for key, value in request.config.items() if key not in _SET_HERE}
    config |= {"train_micro_batch_size_per_gpu": request.micro, "steps_per_print": 10**9}
    zero = request.config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    kept = {key: value for key, value in zero.items() if key not in _ZERO_SET_HERE}
    with tempfile.TemporaryDirectory(prefix="ds_plan_") as folder:
        given, result = Path(folder) / "given.json", Path(folder) / "result.json"
        job = {**asdict(request), "config": config, "zero": kept, "result": str(result)}
        given.write_text(json.dumps(job), encoding="utf-8")
        command = [request.python, "-m", "deepspeed.tools.calibration_rank", str(given)]
        _start(command, ranks, threads, place, tell)
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found


def _start(command: list[str], ranks: int, threads: int, place: Place | None, tell: Any) -> None:
    """Start the ranks, tell their progress, and wait for them. CalibrationError: one failed, with the end of the
    output."""
    port = find_free("127.0.0.1")
    with tempfile.TemporaryFile("w+") as log:
        running = []
        try:
            for rank in range(ranks):
                before, own = place(rank) if place is not None else ([], {})
                environment = {**os.environ, **_environment(rank, ranks, threads, port), **own}
                running.append(subprocess.Popen([*before, *command], env=environment, stdout=log, stderr=log))
            failed = _first_failure(running, Path(command[-1]).with_name("progress"), tell)
            if failed is not None:
                log.seek(0)
                raise CalibrationError(
                    f"a calibration rank exited with status {failed}:\n{log.read()[-3000:]}"
                )
        finally:
            for process in running:
                process.kill()
                process.wait()


def _first_failure(running: Sequence[subprocess.Popen[bytes]], progress: Path, tell: Any) -> int | None:
    """Return the exit status of the first rank that fails, without waiting for the others, which may wait for it; None
    if all have succeeded. CalibrationError: the ranks run longer than ``LIMIT_S``."""
    deadline = time.monotonic() + LIMIT_S
    printed = 0
    while True:
        lines = progress.read_text().splitlines() if progress.exists() else []
        for line in lines[printed:]:
            tell(line)
        printed = len(lines)
        statuses = [process.poll() for process in running]
        failed = next((status for status in statuses if status), None)
        if failed is not None or None not in statuses:
            return failed
        if time.monotonic() > deadline:
            raise CalibrationError(
                f"the calibration did not finish within {LIMIT_S:.0f} s; use a smaller model, such as gpt:10m"
            )
        time.sleep(0.05)


def _environment(rank: int, ranks: int, threads: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "DS_SHM": "0",  # as between hosts
        "PYTHONPATH": os.pathsep.join(
            [*sys.path[:1], *filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()]
        ),
    }
