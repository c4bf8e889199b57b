"""The far side of the test pool: a fork server and the ranks it makes.

`python -m tests.pool_rank FD` imports torch once, with one thread, and then forks a rank for every request
that comes over the socket FD, so that a new rank costs a fork and not an import. A rank serves tests until
its connection closes. It only ever talks to the pytest process; how it is told what to do is in `pool.py`.
A child may also become a script (`forked.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import io
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

ON_PRETENDED_GPU = "PRETENDED_GPU_LIBRARY" in os.environ
if ON_PRETENDED_GPU:  # before torch is imported
    importlib.import_module("tests.pretended_gpu").install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from _pytest.outcomes import Skipped  # noqa: E402

SEED = 1234
_PR_SET_PDEATHSIG = 1
# Environment that libraries set for themselves when first used.
_LIBRARY_ENV = ("TORCHINDUCTOR_", "TRITON_", "PYTORCH_", "KMP_", "PYTEST_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One test on one rank."""

    module: str
    file: str
    qualname: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    rank: int
    world_size: int
    store_file: str
    port: int
    timeout_s: float
    init_process_group: bool
    sys_path: list[str]
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Script:
    """Return what follows `python` on a command line, and how it was given."""

    arguments: list[str]
    env: dict[str, str]
    cwd: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a rank after a phase of a job: `kind` is passed, failed, skipped or leaked."""

    kind: str
    value: Any = None
    text: str = ""


# ---------------------------------------------------------------------------------------------- fork server


def serve(fd: int) -> None:
    """Fork a child per `rank` or `script`, which carry its connection and files; `reap PID` answers how it ended."""
    control = socket.socket(fileno=fd)
    _warm_up()
    control.sendall(b"%08d" % _threads())
    while True:
        message, fds, _, _ = socket.recv_fds(control, 64, 3)
        if not message:  # the pytest process is gone; PDEATHSIG takes the ranks along
            return
        command, _, argument = message.partition(b" ")
        if command == b"reap":
            _, status = os.waitpid(int(argument), 0)
            control.sendall(b"%08d" % os.waitstatus_to_exitcode(status))
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _die_with_parent()
            if command == b"script":
                sys.exit(_run_script(Connection(fds[0]), *fds[1:]))  # the end of a process like any other
            code = 1
            try:
                code = _rank_main(Connection(fds[0]), fds[1])
            finally:
                os._exit(code)
        for inherited in fds:
            os.close(inherited)
        control.sendall(b"%08d" % pid)


def _warm_up() -> None:
    """Import what every test needs and put all of it out of the garbage collector's sight."""
    torch.set_num_threads(1)
    with contextlib.suppress(Exception):  # if it cannot be imported, let the tests say so
        importlib.import_module("deepspeed.engine.initialize")
    _rewrite_assertions()
    gc.collect()
    gc.freeze()


def _threads() -> int:
    """Threads of this process, those of native libraries included where the system tells."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


def _rewrite_assertions() -> None:
    """Give the ranks pytest's assertion messages, from the same cached bytecode as the pytest process."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config())


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------- one script


def _run_script(connection: Connection, output: int, errors: int) -> int:
    """Run `python ARGUMENTS` in this process. The connection closes when the process ends."""
    script: Script = connection.recv()
    _connections.append(connection)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for copied in {output, errors}:
        os.close(copied)
    if script.env.get("PYTHONUNBUFFERED"):
        sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), write_through=True)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(script.env)
    os.chdir(script.cwd)
    first, *rest = script.arguments
    if first == "-c":
        code, *rest = rest
        name, folder = "<string>", ""
    else:
        code, name, folder = Path(first).read_text(encoding="utf-8"), first, str(Path(first).resolve().parent)
    given = [path for path in script.env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [folder, *given]
    sys.argv = [first, *rest]
    main = types.ModuleType("__main__")
    if first != "-c":
        main.__file__ = os.path.abspath(first)
    sys.modules["__main__"] = main
    try:
        exec(compile(code, name, "exec"), vars(main))
    except SystemExit:
        raise
    except BaseException as error:  # as the interpreter does it, but for our frames
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        error.__traceback__ = frames
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
        sys.excepthook(type(error), error, frames)
        return 1
    return 0


_connections: list[Connection] = []  # of a script: open until its process ends

# ---------------------------------------------------------------------------------------------- one rank


def _rank_main(connection: Connection, log_fd: int) -> int:
    """Serve jobs until the other side closes or a job goes wrong: a rank that saw a failure ends."""
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    sys.stdin = open(os.devnull)  # noqa: SIM115 (for the life of the process)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    warnings.filterwarnings("error", category=FutureWarning, module=r"deepspeed(\..*)?")
    if "DS_TEST_THREADS" in os.environ:
        # Not before the fork: threads would be lost in it.
        torch.set_num_threads(int(os.environ["DS_TEST_THREADS"]))
    while True:
        try:
            job: Job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return 0
        if not _serve_job(connection, job):
            return 1


def _serve_job(connection: Connection, job: Job) -> bool:
    """Run the function; then, once every rank of the test is through it, tear down and look for leaks."""
    outcome = _attempt(lambda: _run(job))
    _report(connection, outcome)
    if outcome.kind == "failed":
        return False
    try:
        connection.recv_bytes()  # all ranks have finished: from here on no rank waits for another
    except EOFError:
        return False
    outcome = _attempt(lambda: _tear_down(job))
    _report(connection, outcome)
    return outcome.kind == "passed"


def _attempt(phase: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(kind="passed", value=phase())
    except Skipped as skip:
        return Outcome(kind="skipped", text=str(skip.msg))
    except BaseException as error:  # SystemExit and KeyboardInterrupt inside a test are failures of that test
        frames = error.__traceback__  # from the test on, without ours
        while frames and frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        return Outcome(kind="failed", text="".join(traceback.format_exception(type(error), error, frames)))


def _report(connection: Connection, outcome: Outcome) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        payload = pickle.dumps(outcome)
    except Exception:
        text = f"the test's return value cannot be sent back:\n{traceback.format_exc()}"
        payload = pickle.dumps(Outcome(kind="failed", text=text))
    connection.send_bytes(payload)


def _run(job: Job) -> Any:
    _set_environment(job)
    test = _load(job)
    _before.clear()
    _before.update(snapshot())
    if job.init_process_group:
        _init_process_group(job)
    return test(**job.kwargs)


_before: dict[str, Any] = {}


def _set_environment(job: Job) -> None:
    os.environ.clear()
    os.environ.update(
        job.env,
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        TORCH_GLOO_LAZY_INIT="1",
        DEEPSPEED_PROGRESS=job.env.get("DEEPSPEED_PROGRESS", "0"),  # else engines plan their memory to tell
    )
    sys.path[:] = job.sys_path
    sys.excepthook = sys.__excepthook__  # init_process_group wraps it again each time
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def _init_process_group(job: Job) -> None:
    dist.init_process_group(
        "nccl" if ON_PRETENDED_GPU else "gloo",
        store=dist.FileStore(job.store_file, job.world_size),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout_s),
    )


def _load(job: Job) -> Callable[..., Any]:
    """The plain function behind a decorated test, or the function itself, by module and qualified name."""
    module = sys.modules.get(job.module)
    if module is None:
        module = _import(job)
    found: Any = module
    for part in job.qualname.split("."):
        found = getattr(found, part)
    return getattr(found, "__wrapped__", found)


def _import(job: Job) -> Any:
    with contextlib.suppress(ImportError):
        module = importlib.import_module(job.module)
        if Path(module.__file__ or "").resolve() == Path(job.file).resolve():
            return module
    spec = importlib.util.spec_from_file_location(job.module, job.file)
    assert spec is not None and spec.loader is not None, f"{job.file} is not a Python module"
    module = importlib.util.module_from_spec(spec)
    sys.modules[job.module] = module
    spec.loader.exec_module(module)
    return module


def _tear_down(job: Job) -> None:
    for fixture in job.kwargs.values():
        if type(fixture).__name__ == "MonkeyPatch":
            fixture.undo()  # this rank's copy; pytest undoes its own
    gc.collect()  # engines and groups that only a cycle keeps alive go before their process group does
    if groups := sys.modules.get("deepspeed.comm.documented_groups"):
        groups.set_mesh(None)  # by design it speaks of the engine built last
    if log := sys.modules.get("deepspeed.comm.logging"):
        log.set_newest_log(log.PROCESS_LOG)  # so does this
    if collectives := sys.modules.get("deepspeed.comm.collectives"):
        collectives.use_shared_memory(True)
    if flush := sys.modules.get("deepspeed.checkpoint.files.flush"):
        flush.wait_for_flushes()  # else threads go on
    if dist.is_initialized():
        sys.modules.get("deepspeed.comm", dist).destroy_process_group()
    after = snapshot()
    leaks = [
        f"  {name}: {_before.get(name)!r} before, {after.get(name)!r} after"
        for name in sorted({*_before, *after})
        if after.get(name) != _before.get(name)
    ]
    assert not leaks, "the test left process-wide state behind:\n" + "\n".join(leaks)
    gc.collect()  # else frozen with the rest: communicators that the end of their group has set free
    gc.freeze()  # what survived is modules and caches: the next test's collection need not look at them


# ---------------------------------------------------------------------------------------------- leaks

# What libraries are known to patch.
_PATCHABLE: list[tuple[Any, str]] = [
    (torch, "arange empty empty_like eye full full_like linspace ones ones_like"),
    (torch, "rand rand_like randn randn_like tensor zeros zeros_like"),
    (torch.Tensor, "__new__ to"),
    (torch.nn.Module, "__init__ __init_subclass__ __setattr__ __call__ _apply apply register_parameter"),
    (torch.nn.Linear, "__init__ forward"),
    (torch.nn.functional, "linear"),
]
_GLOBAL_HOOKS = [
    name
    for name, value in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(value, dict)
]


def snapshot() -> dict[str, Any]:
    """Everything process-wide that a test could change and a later one could notice."""
    state: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "torch threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "cwd": os.getcwd(),
        "SIGTERM, SIGINT handlers": (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)),
        "global module hooks": sum(len(getattr(torch.nn.modules.module, name)) for name in _GLOBAL_HOOKS),
        "non-daemon threads": [thread.name for thread in threading.enumerate() if not thread.daemon],
        "process group": dist.is_initialized(),
    }
    collectives = sys.modules.get("deepspeed.comm.collectives")
    state["deepspeed.comm communicators"] = len(collectives._transports) if collectives else 0
    state["deepspeed.comm shared memory"] = collectives.process_network.shared_memory if collectives else True
    log = sys.modules.get("deepspeed.comm.logging")
    state["deepspeed.comm log enabled"] = log.comms_logger.enabled if log else False
    for owner, names in _PATCHABLE:
        state.update({f"{owner.__name__}.{name}": getattr(owner, name) for name in names.split()})
    state.update({f"os.environ[{k}]": v for k, v in os.environ.items() if not k.startswith(_LIBRARY_ENV)})
    return state


if __name__ == "__main__":
    # Under its importable name, so that the jobs pickled by the pytest process are of this very class.
    importlib.import_module("tests.pool_rank").serve(int(sys.argv[1]))
