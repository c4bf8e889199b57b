"""`init_distributed`: determine the identity of this process, create torch's default process group, and inform
Accelerate."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deepspeed.base import environment
from deepspeed.base.accelerator import get_accelerator, take_device_of_rank
from deepspeed.base.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout
from deepspeed.base.environment import Identity
from deepspeed.base.exceptions import ExplainedError
from deepspeed.base.logging import logger
from deepspeed.comm.collectives import Network, histories, process_network, use_shared_memory
from deepspeed.comm.logging import PROCESS_LOG, configure, set_newest_log
from deepspeed.comm.pending import CommunicationError
from deepspeed.comm.record import CommsLogger

if TYPE_CHECKING:
    from deepspeed.config.deepspeed_config import DeepSpeedConfig

_PATIENCE_S = 5.0  # after this long, torch's pauses between attempts matter little


class NotInitializedError(ExplainedError, ValueError, AssertionError):
    """torch.distributed is not initialised."""


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: DeepSpeedConfig | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create torch.distributed's default process group. If it exists, only the sections `comm` and `comms_logger` of
    `config` are applied, to the documented functions and to engines whose config lacks them.

    The rank comes from the arguments, from RANK/WORLD_SIZE (torchrun, the `deepspeed` command), or with
    `auto_mpi_discovery` from an MPI launcher or Slurm. If nothing indicates a job, this process is rank 0
    of 1 and no network is used. `timeout` applies to this and every later group. With
    `dist_init_required=False` the group must already exist.
    """
    if config is not None:
        configure(config)
        wanted = _wants_shared_memory(config)
        if wanted is not None:  # else that of an earlier config
            use_shared_memory(wanted)
    if dist.is_initialized():
        _leave_first_device(dist.get_backend())
        return
    if dist_init_required is False:
        raise NotInitializedError(
            "dist_init_required=False, but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group first, or leave dist_init_required out"
        )
    backend = _usable_backend(dist_backend or get_accelerator().communication_backend_name())
    if "gloo" in backend:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # connect pairs on first use: new groups cost 1/5
    if init_method is None and rank < 0 and world_size < 0:
        identity = _identify(auto_mpi_discovery, distributed_port)
        rank, world_size = identity.rank, identity.world_size
    elif init_method is None:
        rank, world_size = _complete_identity(rank, world_size, distributed_port)
    if verbose and rank <= 0:
        logger.info(f"torch.distributed: backend {backend}, {world_size if world_size > 0 else '?'} ranks")
    _leave_first_device(backend)
    _make_default_group(backend, timeout, init_method, rank, world_size)
    tell_accelerate(backend)


def _leave_first_device(backend: str) -> None:
    """Take this rank's device if the script has chosen none: otherwise tensors created before
    ``deepspeed.initialize`` (``zero.Init``, pipeline groups) would be on the first device, on every rank. With gloo
    there may be more ranks than devices, so nothing is done."""
    if backend != "gloo" and "LOCAL_RANK" in os.environ and get_accelerator().current_device() == 0:
        take_device_of_rank(get_local_rank())


def _usable_backend(backend: str) -> str:
    """Return the backend for the group: NCCL is replaced by gloo if torch is built for CPUs.

    ValueError: torch is built for GPUs but finds none, or lacks NCCL. Something is broken, perhaps on this host only,
    and the first collective would fail or hang.
    """
    if "nccl" not in backend:
        return backend
    if torch.version.cuda is None and torch.version.hip is None:
        logger.warning(
            f"dist_backend={backend!r}: this torch is built for CPUs, without NCCL; using gloo, which moves CPU tensors"
        )
        return "gloo"
    remedy = "leave dist_backend out to use a working one, or pass 'gloo', which moves CPU tensors"
    if not dist.is_nccl_available():
        raise ValueError(f"dist_backend={backend!r}: this torch is built without NCCL; {remedy}")
    if not torch.cuda.is_available():
        raise ValueError(
            f"dist_backend={backend!r}: NCCL needs a GPU, and torch finds none on this host; {remedy}"
        )
    return backend


def _wants_shared_memory(config: DeepSpeedConfig) -> bool | None:
    """Return the config's `shared_memory`; None if not set."""
    section = config.schema.comm
    return section.shared_memory if "shared_memory" in section.model_fields_set else None


def network_of(config: DeepSpeedConfig) -> Network:
    """Make the network of a new engine, with its config's settings and log, or else the process's. The documented
    functions use those of the newest engine that has them. A thread watches for hangs until `Network.leave`."""
    wanted, section = _wants_shared_memory(config), config.comms_config.comms_logger
    log = PROCESS_LOG
    if section.enabled:
        log = CommsLogger()
        log.configure(section)
        set_newest_log(log)
    shared = process_network.engines_share_memory if wanted is None else wanted
    if wanted is not None:
        process_network.use_shared_memory(wanted)
    network = Network(shared_memory=shared, log=log)
    network.hang_report_seconds = config.schema.comm.hang_report_seconds
    if config.wall_clock_breakdown:
        from deepspeed.comm.timed import TimedCommunicator

        network.communicator_class = TimedCommunicator
    if dist.is_initialized() and dist.get_world_size() > 1:
        from deepspeed.comm.hangs import watch

        watch.begin(network, histories)
    return network


def _identify(schedulers: bool, port: int) -> Identity:
    """Return this process's identity, and write it to the environment if a launcher set it."""
    identity = environment.discover(os.environ, port, schedulers=schedulers)
    if identity is None:
        if schedulers and (tasks := environment.idle_slurm_tasks(os.environ)):
            logger.warning(
                f"Slurm gave this job {tasks} tasks (SLURM_NTASKS={tasks}), but this process was started once, "
                f"without srun: it trains alone, as rank 0 of 1. For {tasks} ranks, start it with 'srun python ...'."
            )
        return environment.this_process({})
    if identity.master_addr is None:
        identity = _ask_mpi(identity)
    identity.apply(os.environ)
    return identity


def _ask_mpi(identity: Identity) -> Identity:
    """Get rank 0's address over MPI itself, the last resort."""
    if importlib.util.find_spec("mpi4py") is None:
        raise ValueError(
            f"rank {identity.rank} of {identity.world_size} ({identity.source}) does not know where rank 0 "
            "is: set MASTER_ADDR to rank 0's host name on every rank (mpirun -x MASTER_ADDR=...), or install "
            "mpi4py"
        )
    mpi = importlib.import_module("mpi4py.MPI")
    address = mpi.COMM_WORLD.bcast(_own_address() if identity.rank == 0 else None, root=0)
    return replace(identity, master_addr=address)


def _own_address() -> str:
    """Return the address at which others reach this host; a UDP socket reveals it without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostname()


def _complete_identity(rank: int, world_size: int, port: int) -> tuple[int, int]:
    """Complete rank and world size from the environment, and set defaults for the rendezvous address."""
    known = environment.discover(os.environ, port, schedulers=False) if rank < 0 or world_size < 0 else None
    if known is not None:
        rank = rank if rank >= 0 else known.rank
        world_size = world_size if world_size > 0 else known.world_size
    if rank < 0 or world_size <= rank:
        raise ValueError(f"rank={rank}, world_size={world_size}: pass both, with 0 <= rank < world_size")
    if world_size > 1:
        os.environ.setdefault("MASTER_ADDR", environment.LOOPBACK)
        os.environ.setdefault("MASTER_PORT", str(port))
    return rank, world_size


def _make_default_group(
    backend: str, timeout: timedelta, init_method: str | None, rank: int, world_size: int
) -> None:
    if init_method is None and world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    from deepspeed.comm.hangs.stragglers import awaiting_start

    by_environment = init_method in (None, "env://")
    where = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) if by_environment else (None, None)
    try:
        with awaiting_start(rank, world_size, *where):
            if rank > 0 and by_environment:
                _await_rank_zero(*where)
            dist.init_process_group(
                backend,
                init_method=init_method or "env://",
                rank=rank,
                world_size=world_size,
                timeout=timeout,
            )
    except (RuntimeError, ValueError, OSError) as error:
        raise _rendezvous_error(error, rank, world_size, init_method) from error
    if world_size != 1:
        from deepspeed.comm.hangs import watch  # for several ranks

        watch.announce()


def _await_rank_zero(address: str | None, port: str | None) -> None:
    """Wait until rank 0 listens. torch's client, once refused, sleeps for at least a third of a second before its
    next attempt, and every rank waits for it. Errors here are left for torch to report."""
    pause_s, deadline = 0.002, time.monotonic() + _PATIENCE_S
    while address and port and port.isdecimal() and time.monotonic() < deadline:
        try:
            with socket.socket() as probe:
                probe.settimeout(_PATIENCE_S)
                # The probe's port is free again immediately.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", 0))
                if probe.getsockname()[1] != int(port):  # else, without a listener, it reaches itself
                    probe.connect((address, int(port)))
                    return
        except ConnectionRefusedError:
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.05)
        except (OSError, OverflowError):
            return


def _rendezvous_error(error: Exception, rank: int, world_size: int, init_method: str | None) -> Exception:
    """Return an error that names the failed address and the remedy; other errors are returned unchanged."""
    text = str(error)
    address = (
        init_method
        or f"MASTER_ADDR={os.environ.get('MASTER_ADDR')}, MASTER_PORT={os.environ.get('MASTER_PORT')}"
    )
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return CommunicationError(
            f"rank {rank} cannot open the rendezvous port ({address}): another program is using it, perhaps "
            f"an older job. Choose another port on every rank: MASTER_PORT={_free_port()} is currently free "
            "(deepspeed --master_port, torchrun --master-port, init_distributed(distributed_port=...))."
        )
    if "EACCES" in text or "ermission denied" in text:
        return CommunicationError(
            f"rank {rank} is not allowed to open the rendezvous port ({address}): choose a MASTER_PORT above 1023."
        )
    if "timed out" in text.lower() or "timeout" in text.lower() or isinstance(error, dist.DistNetworkError):
        return CommunicationError(
            f"rank {rank} of {world_size} could not reach the other ranks ({address}): {text}. Check that all "
            f"{world_size} ranks were started, that MASTER_ADDR is rank 0's host and that MASTER_PORT is open there."
        )
    return error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Fill RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT from the MPI launcher (or Slurm)."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    identity = environment.discover(env, distributed_port)
    if identity is None:
        raise ValueError(
            "mpi_discovery: this process was not started by mpirun or srun (no OMPI_*, MV2_*, PMI_*)"
        )
    if identity.master_addr is None:
        identity = _ask_mpi(identity)
    identity.apply(os.environ)
    if verbose:
        logger.info(
            f"{identity.source}: world_rank={identity.rank}, local_rank={identity.local_rank}, "
            f"world_size={identity.world_size}, master_addr={identity.master_addr}, "
            f"master_port={identity.master_port}"
        )


in_aml = partial(environment.in_aml, os.environ)
in_aws_sm = partial(environment.in_aws_sm, os.environ)
in_dlts = partial(environment.in_dlts, os.environ)


def get_local_rank() -> int:
    """Return the rank among the processes of this host (LOCAL_RANK, 0 if unset)."""
    return int(os.environ.get("LOCAL_RANK", 0))


def require_initialized(name: str) -> None:
    """Raise NotInitializedError unless the default group exists."""
    if not dist.is_initialized():
        raise NotInitializedError(f"deepspeed.comm.{name}: call deepspeed.init_distributed() first")


def tell_accelerate(backend: str) -> None:
    """Complete the state that Accelerate is building while it requests a process group from us.

    Without an accelerator, Accelerate chooses no backend, lets us choose one, and then interprets the missing choice
    as "no distributed training": each rank assumes that it is the only one and reads all of the data, and
    Transformers computes the batch size for one rank. Accelerate's `PartialState` keeps its state in one dict per
    process; while being built, it holds `backend` but not yet `num_processes`.
    """
    module = sys.modules.get("accelerate.state")
    state: Any = getattr(getattr(module, "PartialState", None), "_shared_state", None)
    if isinstance(state, dict) and "num_processes" not in state and state.get("backend", backend) is None:
        state["backend"] = backend
