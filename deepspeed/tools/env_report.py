"""``ds_report``: report the ops and the environment of this machine and installation.

Two parts: the ops with the path each takes here, and the environment (versions, devices, cores, memory,
communication backends). ``[WARNING]`` lines say what to install or change for a faster or a working path.
``--bench`` times every op and every inference kernel on its path.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed

from deepspeed.base.accelerator import get_accelerator, host_memory
from deepspeed.base.numa import available_cores, cpu_name, format_range_list, get_numa_cores
from deepspeed.base.tool_arguments import exit_quietly
from deepspeed.observe import op_speed as speed
from deepspeed.ops import native
from deepspeed.ops.op_builder import ALL_OPS
from deepspeed.tools import parsers
from deepspeed.version import __version__, git_branch, git_hash

GREEN, RED, YELLOW, END = "\033[92m", "\033[91m", "\033[93m", "\033[0m"
RULE = "-" * 70
NAME_WIDTH = 26
TITLE_WIDTH = 34
BUILD_PREFIX = "DS_BUILD_"  # of the variables that select the ops to compile; here nothing is compiled
PACKAGE = Path(__file__).parents[1]
SHARED_MEMORY = "/dev/shm"
ENOUGH_SHARED_MEMORY = 512 * 1024**2  # bytes; NCCL and data loader workers exchange data through it

# Packages whose versions answer most questions, in display order.
PACKAGES = (
    "numpy", "pydantic", "safetensors", "triton", "transformers", "accelerate", "lightning", "trl", "peft",
)  # fmt: skip
BACKENDS = {
    "gloo": torch.distributed.is_gloo_available,
    "nccl": torch.distributed.is_nccl_available,
    "mpi": torch.distributed.is_mpi_available,
    "ucc": torch.distributed.is_ucc_available,
}


def _paint(text: str, color: str) -> str:
    return f"{color}{text}{END}" if sys.stdout.isatty() else text


def _warn(text: str) -> str:
    return f"{_paint('[WARNING]', YELLOW)} {text}"


def _row(title: str, value: object) -> str:
    return f"{title} {'.' * (TITLE_WIDTH - len(title))} {value}"


def human_readable_size(size: float) -> str:
    """Format a number of bytes as ``"1.50 GB"``, in powers of 1024."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024:
            return f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TB"


# --- Ops ------------------------------------------------------------------------------------------


def op_report(verbose: bool = True, bench: bool = False, bench_dir: str | None = None) -> None:
    """Print for each op whether it is available here and on which path; ``verbose`` adds hints, ``bench`` measured
    speeds (file ops are timed in ``bench_dir``).
    """
    print(RULE)
    print("DeepSpeed op report: kernels come with the package; nothing is compiled at run time")
    print(f"{BUILD_PREFIX}* variables are accepted but have no effect{_build_variables()}")
    print(RULE)
    print(f"{'op name':{NAME_WIDTH}} status    path")
    hints: dict[str, None] = {}  # an ordered set
    for builder in (make() for make in ALL_OPS.values()):
        path = builder.path()
        status = _paint("[OKAY]", GREEN) + "  " if path else _paint("[NO]", RED) + "    "
        missing = "no op of its own" if builder.OP.module is None else f"needs {builder.OP.needs}"
        print(f"{builder.name + ' ':.<{NAME_WIDTH}} {status}  {path or f'{missing}; {builder.OP.instead}'}")
        if builder.hint():
            hints[builder.hint()] = None
        for result in speed.of_op(builder, bench_dir) if bench else ():
            print(_speed_row("", result))
    if bench:
        print(f"kernels that belong to no op, {native.isa() or 'torch'}")
        for name, result in speed.of_other_kernels().items():
            print(_speed_row(name, result))
        _inference_report()
    if verbose:
        for hint in [*hints, *_path_hints(), *(_load_hints() if bench else ())]:
            print(_warn(hint))


def _inference_report() -> None:
    """Print the speeds of the inference kernels."""
    from deepspeed.inference.kernel_speed import Machine, kernel_speeds  # imports the inference engine

    machine = Machine()
    stream = machine.stream()
    print(f"kernels of inference on {machine.device.type}, memory stream {stream / 1e9:.1f} GB/s")
    for result in kernel_speeds(machine, stream):
        print(_speed_row(result.name, result))


def _speed_row(name: str, result: object) -> str:
    return f"{f'  {name}':{NAME_WIDTH}} {result}"


def _build_variables() -> str:
    found = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(BUILD_PREFIX))
    return f" (set here: {', '.join(found)})" if found else ""


def _path_hints() -> Iterator[str]:
    isa, wanted = native.isa(), os.environ.get("DS_NATIVE_ISA")
    if isa is not None and wanted:
        yield (f"DS_NATIVE_ISA={wanted}: native kernels use {isa}; unset it for the best on this CPU.")


def _load_hints() -> Iterator[str]:
    load, cores = (os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0), len(available_cores())
    if load > cores + 1:
        yield (f"The load is {load:.1f} on {cores} cores: other programs run, so all times are too high.")


# --- Environment ----------------------------------------------------------------------------------


def get_shm_size() -> int | None:
    """Return the size in bytes of the shared-memory file system; None if there is none."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).total
    except OSError:
        return None


def debug_report(verbose: bool = True) -> None:
    """Print versions, devices, cores, memory and communication backends; ``verbose`` adds the hints."""
    print(RULE)
    print("DeepSpeed general environment info")
    print(RULE)
    sections = (_versions(), _devices(), _host(), _communication())
    for title, value in (row for section in sections for row in section):
        print(_row(title, value))
    if verbose:
        for hint in _environment_hints():
            print(_warn(hint))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> str:
    """Return commit and branch from which the package was built, else those of its source tree, else "unknown"."""
    if git_hash != "unknown":
        return f"{git_hash} {git_branch}"
    root = PACKAGE.parent
    if not (root / ".git").exists() or shutil.which("git") is None:
        return "unknown"
    command = ["git", "-C", str(root), "log", "-1", "--format=%h %D"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _versions() -> Iterator[tuple[str, object]]:
    yield "deepspeed install path", str(PACKAGE)
    yield "deepspeed version, git", f"{__version__}, {_git()}"
    yield "torch install path", torch.__path__[0]
    yield "torch version", torch.__version__
    yield "torch built for CUDA, HIP", f"{torch.version.cuda}, {torch.version.hip}"
    yield "python version", f"{platform.python_version()} ({sys.executable})"
    yield "system", platform.platform()
    found = {package: _version(package) for package in PACKAGES}
    yield "packages", ", ".join(f"{package} {version}" for package, version in found.items() if version)


def _devices() -> Iterator[tuple[str, object]]:
    accelerator = get_accelerator()
    chosen_by = "DS_ACCELERATOR" if os.environ.get("DS_ACCELERATOR") else "what torch found"
    yield "accelerator", f"{accelerator.device_name()} (by {chosen_by})"
    if not accelerator.is_available():
        yield "devices", "none"
        return
    dtypes = [str(dtype).removeprefix("torch.") for dtype in accelerator.supported_dtypes()]
    yield "data types for training", ", ".join(dtypes)
    if accelerator.device_name() == "cpu":
        return
    for index in range(accelerator.device_count()):
        total = human_readable_size(accelerator.total_memory(index))
        name = torch.cuda.get_device_name(index) if accelerator.device_name() == "cuda" else ""
        yield f"device {accelerator.device_name(index)}", f"{name} {total}".strip()


def _host() -> Iterator[tuple[str, object]]:
    cores = available_cores()
    numa = "; ".join(format_range_list(node) for node in get_numa_cores()) or "unknown"
    yield "CPU", cpu_name()
    yield "cores", f"{len(cores)} of {os.cpu_count()} ({format_range_list(cores)}), NUMA nodes: {numa}"
    yield "threads of torch", torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    yield "native kernels", f"{native.isa() or 'no library'}, CPU capability of torch: {capability}"
    available, total = host_memory.machine_available_bytes(), host_memory.machine_total_bytes()
    yield "memory", f"{human_readable_size(available)} available of {human_readable_size(total)}"
    size = get_shm_size()
    yield f"shared memory ({SHARED_MEMORY})", "none" if size is None else human_readable_size(size)


def _communication() -> Iterator[tuple[str, object]]:
    available = [name for name, is_available in BACKENDS.items() if is_available()]
    accelerator = get_accelerator()
    yield "communication backends", ", ".join(available) or "none"
    version = accelerator.communication_backend_version()
    text = "" if version is None else " " + ".".join(map(str, version))
    yield f"backend for {accelerator.device_name()}", accelerator.communication_backend_name() + text


def _environment_hints() -> Iterator[str]:
    accelerator = get_accelerator()
    backend = accelerator.communication_backend_name()
    if backend in BACKENDS and not BACKENDS[backend]():
        yield (
            f"This torch has no {backend}, which {accelerator.device_name()} needs: install another build."
        )
    if not accelerator.is_available():
        yield f"No {accelerator.device_name()} device was found; unset DS_ACCELERATOR to use what is available."
    size = get_shm_size()
    if size is not None and size < ENOUGH_SHARED_MEMORY:
        yield (
            f"{SHARED_MEMORY} has only {human_readable_size(size)}: ranks and data loader workers may fail; "
            f"start a container with --shm-size=1g or more."
        )
    if len(available_cores()) < (os.cpu_count() or 1) // 2:
        yield "This process may use less than half of the cores (affinity); ranks started by it inherit that."


# --- Command line ---------------------------------------------------------------------------------


def parse_arguments(args: list[str] | None = None) -> argparse.Namespace:
    return parsers.report().parse_args(args)


def main(
    hide_operator_status: bool = False,
    hide_errors_and_warnings: bool = False,
    bench: bool = False,
    bench_dir: str | None = None,
) -> None:
    if bench or not hide_operator_status:
        op_report(verbose=not hide_errors_and_warnings, bench=bench, bench_dir=bench_dir)
    debug_report(verbose=not hide_errors_and_warnings)


@exit_quietly("ds_report")
def cli_main(args: list[str] | None = None) -> None:
    arguments = parse_arguments(args)
    main(
        hide_operator_status=arguments.hide_operator_status,
        hide_errors_and_warnings=arguments.hide_errors_and_warnings,
        bench=arguments.bench,
        bench_dir=arguments.bench_dir,
    )


if __name__ == "__main__":
    cli_main()
