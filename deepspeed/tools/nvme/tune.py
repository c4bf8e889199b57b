"""`ds_nvme_tune`: try configurations of `aio_handle` on directories and print the best as the `aio` section."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deepspeed.base.tool_arguments import exit_quietly
from deepspeed.tools import parsers
from deepspeed.tools.nvme.measure import FLAGS, MeasurePlan, Transfer, aio_section, check_devices, speeds

DEFAULT_SPACE: dict[str, list[Any]] = {
    "block_size": ["1M", "8M"],
    "queue_depth": [32, 128],
    "intra_op_parallelism": [1, 2, 4, 8],
    "overlap_events": [True, False],
    "single_submit": [False],
}
FILE_PREFIX = "_ds_nvme_tune"
_OTHER_NAMES = {"io_parallel": "intra_op_parallelism"}


def space_of(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all combinations of the lists in `config`, as fields of `Transfer`. ValueError for unknown keys or invalid
    values."""
    lists: dict[str, list[Any]] = {}
    for key, values in config.items():
        name = _OTHER_NAMES.get(key, key)
        if name not in DEFAULT_SPACE:
            raise ValueError(
                f"sweep configuration: unknown setting {key!r}; expected one of {', '.join(DEFAULT_SPACE)}"
            )
        lists[name] = [_value(name, value) for value in (values if isinstance(values, list) else [values])]
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def _value(name: str, value: Any) -> Any:
    text = str(value).lower()
    if name in FLAGS:
        if text not in ("true", "false"):
            raise ValueError(f"sweep configuration: {name} = {value!r}: expected true or false")
        return text == "true"
    return parsers.byte_count(text)


def sweep(args: argparse.Namespace, space: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measure each configuration; return its settings with "read" and "write" in GB/s (None: not measured)."""
    kinds = [kind for kind, left_out in (("read", args.no_read), ("write", args.no_write)) if not left_out]
    results = []
    args.log_dir.mkdir(parents=True, exist_ok=True)
    with (
        open(args.log_dir / "results.jsonl", "w", encoding="utf-8") as log,
        tqdm(total=len(space) * len(kinds), unit="measurement", disable=None, leave=False) as bar,
    ):
        for settings in space:
            row: dict[str, Any] = {**settings, "read": None, "write": None}
            bar.set_description(", ".join(f"{name}={value}" for name, value in settings.items()))
            for kind in kinds:
                row[kind] = _speed(args, settings, kind)
                bar.update()
            results.append(row)
            print(json.dumps(row), file=log, flush=True)
            if args.verbose:
                tqdm.write(json.dumps(row), file=sys.stdout)
    return results


def _speed(args: argparse.Namespace, settings: Mapping[str, Any], kind: str) -> float:
    transfer = Transfer(
        io_size=parsers.byte_count(args.io_size),
        read=kind == "read",
        gds=args.gds,
        **settings,
    )
    if transfer.read and args.flush_page_cache:
        _flush_page_cache()
    plans = []
    for index, folder in enumerate(args.nvme_dir):
        own = dataclasses.replace(transfer, device=index if args.gpu or args.gds else None)
        plans.append(MeasurePlan(own, folder, FILE_PREFIX, args.loops))
    return statistics.median(speeds(plans))


def _flush_page_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1", encoding="ascii")


def best(results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the configuration with the shortest time to read and write one byte each."""
    return min(results, key=lambda row: sum(1 / row[kind] for kind in ("read", "write") if row[kind]))


@exit_quietly("ds_nvme_tune", OSError, ValueError, NotImplementedError)
def main(arguments: Sequence[str] | None = None) -> int:
    args = parsers.nvme_tune().parse_args(arguments)
    try:
        return _tune(args)
    finally:
        for folder in args.nvme_dir:
            if os.path.isdir(folder):
                Path(folder, f"{FILE_PREFIX}_0.bin").unlink(missing_ok=True)


def _read_sweep(path: Path) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--sweep_config {path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--sweep_config {path} is not an object that maps settings to lists of values")
    return found


def _tune(args: argparse.Namespace) -> int:
    check_devices(args.gpu)
    if args.no_read and args.no_write:
        raise ValueError("--no_read and --no_write leave nothing to measure")
    for folder in args.nvme_dir:
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"{folder}: no such directory")
    space = space_of(_read_sweep(args.sweep_config) if args.sweep_config else DEFAULT_SPACE)
    print(f"Running DeepNVMe performance tuning on {args.nvme_dir}", flush=True)
    row = best(sweep(args, space))
    found = ", ".join(f"{kind} = {row[kind]:.2f}" for kind in ("read", "write") if row[kind] is not None)
    print(f"Best performance (GB/sec): {found}")
    print(json.dumps(aio_section(row), indent=3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
