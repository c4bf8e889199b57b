"""Arguments of the tools whose work needs torch. Help and mistakes in arguments cost none of its import.

Each function returns the parser of one tool; the module that does the work parses with the same one.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from deepspeed.base.tool_arguments import ArgumentParser, positive
from deepspeed.planning.step_time import options as time_options

IO_ENGINES = ("aio_handle", "aio_basic", "torch_io", "torch_fastio")
"""Ways in which `ds_io` accesses files."""

_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_PLAN_EPILOG = """\
The model is built on the meta device: no weights are read and nothing is allocated. MODEL is a Hugging Face folder or
config.json, a name that transformers knows, module:function (called without arguments, returns an nn.Module), or a
shape: gpt:LAYERSxWIDTHxHEADS, or gpt:10m to gpt:70b.

Model states, buckets, gathers and offload buffers are counted exactly; activations are estimated from the shape of a
Hugging Face model, and marked as such. The exit code is 1 if the run does not fit into the available memory, and 2 for
errors. --device-memory, --host-memory and --disk describe a machine other than this one.

examples:
  ds plan ds_config.json --model ./Llama-3.1-8B --gpus 8 --micro-batch 1 --sequence 4096 --device-memory 80G
  ds plan ds_config.json --model train:build_model --gpus 2 --device cpu
  ds plan ds_config.json --model . --gpus 8 --nodes 2 --set zero_optimization.stage=3
  ds plan ds_config.json --model gpt:70b --gpus 8 --nodes 8 --on H100 --network NDR --sequence 4096 --choices
  ds plan ds_config.json --model gpt:10m --sequence 256 --calibrate here.json
  ds plan ds_config.json --model gpt:10m --sequence 256 --nodes 4 --calibration here.json --network 100Mbit
"""


def plan() -> argparse.ArgumentParser:
    made = ArgumentParser(
        prog="ds plan",
        description="Predict the bytes per rank on device, host and disk, by kind and phase, whether they fit, and\n"
        "the cheapest change that makes them fit.",
        epilog=_PLAN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "config",
        help="JSON or HJSON file, urlsafe-base64 JSON text, or a config file of Accelerate or TrainingArguments",
    )
    made.add_argument(
        "--model",
        required=True,
        help="Hugging Face folder, config.json or name, module:function, or a shape such as gpt:7b",
    )
    _add_run(made)
    add_machine(made)
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a key of the config, such as bf16.enabled=true (can be repeated)",
    )
    _add_link(made)
    made.add_argument("--json", action="store_true", help="print one JSON object with bytes as numbers")
    time_options.add_options(made)
    return made


def _add_run(made: argparse.ArgumentParser) -> None:
    """Add what describes the run to plan: its ranks, its batch, and how the script builds the model."""
    made.add_argument("--gpus", type=positive, default=1, metavar="N", help="ranks per node (default: 1)")
    made.add_argument("--nodes", type=positive, default=1, metavar="M", help="number of nodes (default: 1)")
    made.add_argument(
        "--micro-batch",
        type=positive,
        metavar="B",
        help="samples per micro-batch (default: the config's, else 1)",
    )
    made.add_argument(
        "--sequence", type=positive, metavar="S", help="tokens per sample, for activations and time"
    )
    made.add_argument("--checkpointing", action="store_true", help="the model uses activation checkpointing")
    made.add_argument("--zero-init", action="store_true", help="the model is built under zero.Init (stage 3)")
    made.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="dtype in which the training script builds the model",
    )


def add_machine(made: argparse.ArgumentParser) -> None:
    """Add the kind of device and the sizes of memory."""
    made.add_argument(
        "--device", help="type of device, such as cuda or cpu (default: the one of this machine, else cuda)"
    )
    made.add_argument(
        "--device-memory", type=_size, metavar="SIZE", help="memory of each device, such as 80G"
    )
    made.add_argument(
        "--host-memory",
        type=_size,
        metavar="SIZE",
        help="memory of each node (default: what is available on this machine)",
    )
    made.add_argument("--disk", type=_size, metavar="SIZE", help="space for swap files on each node")


def _add_link(made: argparse.ArgumentParser) -> None:
    """Add the slow link between nodes, for a prediction of the step time over it."""
    made.add_argument(
        "--link-mbits",
        type=positive_number,
        metavar="RATE",
        help="Mbit/s between nodes: also predict the step time, with and without options that send less",
    )
    made.add_argument(
        "--compute-seconds",
        type=positive_number,
        default=1.0,
        metavar="T",
        help="with --link-mbits: compute time per step (default: 1)",
    )


def check() -> argparse.ArgumentParser:
    made = ArgumentParser(
        prog="ds_check",
        description="Check a DeepSpeed config: report all misspelt keys, wrong values and impossible combinations at "
        "once, and the resulting batch sizes. The exit code is 1 if there are errors.",
    )
    made.add_argument(
        "config",
        help="JSON or HJSON file, urlsafe-base64 JSON text, a file written by `accelerate config`, or "
        "TrainingArguments with a deepspeed key, as JSON or YAML",
    )
    made.add_argument(
        "--gpus",
        "--ranks",
        type=positive,
        metavar="N",
        help="number of ranks of the job (default: from the environment, else 1)",
    )
    made.add_argument(
        "--fix",
        action="store_true",
        help="correct what is unambiguous: misspelt keys, deprecated spellings, values of the wrong type. Shows the "
        "changes and keeps the original file as CONFIG.bak",
    )
    made.add_argument("--output", metavar="FILE", help="with --fix: write to FILE and leave CONFIG unchanged")
    made.add_argument("--no-color", action="store_true", help="print plain text even on a terminal")
    return made


def report() -> argparse.ArgumentParser:
    made = ArgumentParser(
        prog="ds_report", description="Report which ops can be used on this machine, and the environment."
    )
    made.add_argument("--hide_operator_status", action="store_true", help="leave out the table of ops")
    made.add_argument(
        "--hide_errors_and_warnings",
        action="store_true",
        help="leave out the lines that start with [WARNING]",
    )
    made.add_argument(
        "--bench",
        action="store_true",
        help="time each op and each inference kernel on the path it takes here, against memory bandwidth and PyTorch's "
        "operations (half a minute at most)",
    )
    made.add_argument(
        "--bench_dir", help="folder for the file used to time async_io (default: a temporary one)"
    )
    return made


def elastic() -> argparse.ArgumentParser:
    made = ArgumentParser(
        prog="ds_elastic",
        description="Print the batch size and the numbers of ranks that an `elasticity` section results in.",
    )
    made.add_argument("-c", "--config", required=True, metavar="FILE", help="the config, in JSON or HJSON")
    made.add_argument(
        "-w",
        "--world-size",
        type=int,
        default=0,
        metavar="N",
        help="number of ranks: also print the micro-batch size (version 0.2 needs it, here or in WORLD_SIZE)",
    )
    return made


def io() -> argparse.ArgumentParser:
    made = ArgumentParser(
        prog="ds_io",
        description="Time reads or writes of files with one configuration, and print it as an `aio` section.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    where = made.add_mutually_exclusive_group(required=True)
    where.add_argument("--folder", help="directory for the files")
    where.add_argument(
        "--folder_to_device_mapping",
        nargs="+",
        metavar="FOLDER:DEVICES",
        help="directories and the accelerators that use each, such as /nvme0:0,1 /nvme1:2,3",
    )
    made.add_argument("--io_size", type=_bytes, required=True, help="bytes per file (K, M, G)")
    made.add_argument("--fast_io_size", type=_bytes, default="64M", help="bytes that torch_fastio buffers")
    made.add_argument("--read", action="store_true", help="time reads instead of writes")
    made.add_argument(
        "--multi_process", type=_count, default=1, help="processes per folder, with one file each"
    )
    made.add_argument("--block_size", type=_bytes, default="1M", help="bytes per request")
    made.add_argument("--queue_depth", type=_count, default=32, help="requests in flight")
    made.add_argument("--single_submit", action="store_true", help="one system call per request")
    made.add_argument(
        "--sequential_requests", action="store_true", help="do not overlap submission and waiting"
    )
    made.add_argument(
        "--validate", action="store_true", help="verify the transferred bytes, within the measured time"
    )
    made.add_argument("--engine", choices=IO_ENGINES, default="aio_handle", help="how files are accessed")
    made.add_argument("--loops", type=_count, default=3, help="measured repetitions")
    made.add_argument("--io_parallel", type=_count, default=1, help="threads that share one transfer")
    made.add_argument("--gpu", action="store_true", help="use tensors on the accelerator")
    made.add_argument("--use_gds", action="store_true", help="use GPUDirect Storage")
    made.add_argument(
        "--slow_bounce_buffer", action="store_true", help="use pageable instead of page-locked host memory"
    )
    made.add_argument(
        "--torch_legacy_save", action="store_true", help="use torch's legacy format instead of zip files"
    )
    made.add_argument(
        "--use_accelerator_pin_memory",
        action="store_true",
        help="use memory pinned for the accelerator (locked memory already is, if there is an accelerator)",
    )
    made.add_argument(
        "--warmup_loops", type=int, default=1, help="repetitions before those that are measured"
    )
    made.add_argument(
        "--include_warmup_time", action="store_true", help="average the warm-up repetitions too"
    )
    made.add_argument(
        "--different_file_each_iteration", action="store_true", help="use a new file for each repetition"
    )
    return made


def nvme_tune() -> argparse.ArgumentParser:
    made = ArgumentParser(
        prog="ds_nvme_tune",
        description="Try configurations of `aio_handle` and print the best as an `aio` section.",
    )
    made.add_argument("--nvme_dir", nargs="+", required=True, help="writable directories, one per device")
    made.add_argument(
        "--sweep_config", type=Path, help="JSON file that maps the name of a setting to a list of values"
    )
    made.add_argument("--no_read", action="store_true", help="do not measure reads")
    made.add_argument("--no_write", action="store_true", help="do not measure writes")
    made.add_argument(
        "--io_size", default="400M", help="bytes to move per measurement (default: %(default)s)"
    )
    made.add_argument("--gpu", action="store_true", help="use tensors on the GPU")
    made.add_argument("--gds", action="store_true", help="use GPUDirect Storage")
    made.add_argument(
        "--flush_page_cache", action="store_true", help="empty the page cache before each read (needs root)"
    )
    made.add_argument(
        "--log_dir",
        type=Path,
        default=Path("_aio_bench_logs"),
        help="folder for logs (default: ./%(default)s)",
    )
    made.add_argument("--loops", type=int, default=1, help="repetitions (default: %(default)s)")
    made.add_argument("--verbose", action="store_true", help="print each measurement")
    return made


def positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(i?B)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 80G or 512M (binary units)")
    return int(float(match[1]) * _SIZES[match[2].upper()])


def _bytes(text: str) -> int:
    try:
        return byte_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least 1")
    return int(text)


def byte_count(text: str) -> int:
    """`400M` -> 419430400. ValueError for anything but a positive integer, optionally followed by K, M, G or T."""
    number, factor = text.strip().upper().removesuffix("B"), 1
    if number and number[-1] in _SIZES:
        number, factor = number[:-1], _SIZES[number[-1]]
    if not number.isdigit() or int(number) == 0:
        raise ValueError(f"{text!r}: expected a number of bytes, such as 1048576, 400M or 1G")
    return int(number) * factor
