"""Argument parsers of the tools that need torch, in a separate module: help and usage errors do not import torch.

Each function returns the parser of one tool; the module that does the work parses with the same one.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from deepspeed.base.tool_arguments import ArgumentParser, add_options, positive, takes
from deepspeed.planning.step_time.options import STEP_TIME

IO_ENGINES = ("aio_handle", "aio_basic", "torch_io", "torch_fastio")
"""File access methods of `ds_io`."""

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


def byte_count(text: str) -> int:
    """Parse `400M` to 419430400. ValueError for anything but a positive integer, optionally followed by K, M, G or
    T."""
    number, factor = text.strip().upper().removesuffix("B"), 1
    if number and number[-1] in _SIZES:
        number, factor = number[:-1], _SIZES[number[-1]]
    if not number.isdigit() or int(number) == 0:
        raise ValueError(f"{text!r}: expected a number of bytes, such as 1048576, 400M or 1G")
    return int(number) * factor


_RUN = {
    "--gpus N": takes("ranks per node (default: 1)", 1, type=positive),
    "--nodes M": takes("number of nodes (default: 1)", 1, type=positive),
    "--micro-batch B": takes("samples per micro-batch (default: the config's, else 1)", type=positive),
    "--sequence S": takes("tokens per sample, for activations and time", type=positive),
    "--checkpointing": "assume activation checkpointing",
    "--zero-init": "assume that the model is built under zero.Init (stage 3)",
    "--dtype": takes(
        "dtype in which the training script builds the model", "fp32", choices=("fp32", "bf16", "fp16")
    ),
}
"""Options for the run to plan: ranks, batch, and how the script builds the model."""

MACHINE = {
    "--device": takes("type of device, such as cuda or cpu (default: the one of this machine, else cuda)"),
    "--device-memory SIZE": takes("memory of each device, such as 80G", type=_size),
    "--host-memory SIZE": takes(
        "memory of each node (default: what is available on this machine)", type=_size
    ),
    "--disk SIZE": takes("space for swap files on each node", type=_size),
}
"""Options for the device type and the memory sizes."""

_LINK = {
    "--link-mbits RATE": takes(
        "Mbit/s between nodes: also predict the step time, with and without options that reduce communication",
        type=positive_number,
    ),
    "--compute-seconds T": takes(
        "with --link-mbits: compute time per step (default: 1)", 1.0, type=positive_number
    ),
}
"""Options for the link between nodes, to predict the step time over it."""


def plan() -> argparse.ArgumentParser:
    made = ArgumentParser(
        prog="ds plan",
        description="Predict the bytes per rank on device, host and disk, by kind and phase, whether they fit, and\n"
        "the cheapest change that makes them fit.",
        epilog=_PLAN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options = {
        "config": "JSON or HJSON file, urlsafe-base64 JSON text, or a config file of Accelerate or "
        "TrainingArguments",
        "--model": takes(
            "Hugging Face folder, config.json or name, module:function, or a shape such as gpt:7b",
            required=True,
        ),
        **_RUN,
        **MACHINE,
        "--set KEY=VALUE": takes(
            "change a key of the config, such as bf16.enabled=true (can be repeated)", [], action="append"
        ),
        **_LINK,
        "--json": "print one JSON object with bytes as numbers",
    }
    add_options(made, options)
    add_options(made.add_argument_group("step time"), STEP_TIME)
    return made


def check() -> argparse.ArgumentParser:
    made = ArgumentParser(
        prog="ds_check",
        description="Check a DeepSpeed config: report all misspelt keys, wrong values and impossible combinations at "
        "once, and the resulting batch sizes. The exit code is 1 if there are errors.",
    )
    options = {
        "config": "JSON or HJSON file, urlsafe-base64 JSON text, a file written by `accelerate config`, or "
        "TrainingArguments with a deepspeed key, as JSON or YAML",
        "--gpus --ranks N": takes(
            "number of ranks of the job (default: from the environment, else 1)", type=positive
        ),
        "--fix": "correct what is unambiguous: misspelt keys, deprecated spellings, values of the wrong type. Shows "
        "the changes and keeps the original file as CONFIG.bak",
        "--output FILE": takes("with --fix: write to FILE and leave CONFIG unchanged"),
        "--no-color": "print plain text even on a terminal",
    }
    return add_options(made, options)


def report() -> argparse.ArgumentParser:
    made = ArgumentParser(
        prog="ds_report", description="Report the available ops and the environment of this machine."
    )
    options = {
        "--hide_operator_status": "leave out the table of ops",
        "--hide_errors_and_warnings": "leave out the lines that start with [WARNING]",
        "--bench": "time each op and each inference kernel on the path it takes here, against memory bandwidth and "
        "PyTorch's operations (takes up to half a minute)",
        "--bench_dir": takes("folder for the file used to time async_io (default: a temporary one)"),
    }
    return add_options(made, options)


def elastic() -> argparse.ArgumentParser:
    made = ArgumentParser(
        prog="ds_elastic",
        description="Print the batch size and the possible numbers of ranks of an `elasticity` section.",
        epilog="example: ds_elastic -c ds_config.json -w 8",
    )
    options = {
        "-c --config FILE": takes("the config, in JSON or HJSON", required=True),
        "-w --world-size N": takes(
            "number of ranks: also print the micro-batch size (version 0.2 needs it, here or in WORLD_SIZE)",
            0,
        ),
    }
    return add_options(made, options)


_IO_FOLDERS = {
    "--folder": takes("directory for the files"),
    "--folder_to_device_mapping FOLDER:DEVICES": takes(
        "directories and the accelerators that use each, such as /nvme0:0,1 /nvme1:2,3", nargs="+"
    ),
}
_IO = {
    "--io_size": takes("bytes per file (K, M, G)", type=_bytes, required=True),
    "--fast_io_size": takes("bytes that torch_fastio buffers", "64M", type=_bytes),
    "--read": "time reads instead of writes",
    "--multi_process": takes("processes per folder, with one file each", 1, type=positive),
    "--block_size": takes("bytes per request", "1M", type=_bytes),
    "--queue_depth": takes("requests in flight", 32, type=positive),
    "--single_submit": "one system call per request",
    "--sequential_requests": "do not overlap submission and completion",
    "--validate": "verify the transferred bytes (counted in the measured time)",
    "--engine": takes("how files are accessed", "aio_handle", choices=IO_ENGINES),
    "--loops": takes("measured repetitions", 3, type=positive),
    "--io_parallel": takes("threads that share one transfer", 1, type=positive),
    "--gpu": "use tensors on the accelerator",
    "--use_gds": "use GPUDirect Storage",
    "--slow_bounce_buffer": "use pageable instead of page-locked host memory",
    "--torch_legacy_save": "use torch's legacy format instead of zip files",
    "--use_accelerator_pin_memory": "use memory pinned for the accelerator (locked memory already is, if there is "
    "an accelerator)",
    "--warmup_loops": takes("warm-up repetitions before the measured ones", 1),
    "--include_warmup_time": "include the warm-up repetitions in the result",
    "--different_file_each_iteration": "use a new file for each repetition",
}


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def io() -> argparse.ArgumentParser:
    made = ArgumentParser(
        prog="ds_io",
        description="Time reads or writes of files with one configuration, and print it as an `aio` section.",
        formatter_class=_Defaults,
    )
    add_options(made.add_mutually_exclusive_group(required=True), _IO_FOLDERS)
    return add_options(made, _IO)


def nvme_tune() -> argparse.ArgumentParser:
    made = ArgumentParser(
        prog="ds_nvme_tune",
        description="Try configurations of `aio_handle` and print the best as an `aio` section.",
    )
    options = {
        "--nvme_dir": takes("writable directories, one per device", nargs="+", required=True),
        "--sweep_config": takes("JSON file that maps the name of a setting to a list of values", type=Path),
        "--no_read": "do not measure reads",
        "--no_write": "do not measure writes",
        "--io_size": takes("bytes to move per measurement (default: %(default)s)", "400M"),
        "--gpu": "use tensors on the GPU",
        "--gds": "use GPUDirect Storage",
        "--flush_page_cache": "empty the page cache before each read (needs root)",
        "--log_dir": takes("folder for logs (default: ./%(default)s)", Path("_aio_bench_logs"), type=Path),
        "--loops": takes("repetitions (default: %(default)s)", 1),
        "--verbose": "print each measurement",
    }
    return add_options(made, options)
