"""Record communication calls: count, size, time, bandwidth, and stragglers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from statistics import fmean
from typing import Any

import torch.distributed as dist

from deepspeed.base.logging import logger

# message size in bytes -> [count, latencies in ms, algorithm bandwidths in Gbps, bus bandwidths in Gbps]
SizeRecords = dict[int, list[Any]]

_GATHERING = ("all_gather", "reduce_scatter")
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
_TABLE_HEAD = (
    "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)",
)  # fmt: skip
_STRAGGLER_HEAD = (
    *("Message Size", "Count", "Total comm lat(ms)", "Total straggler(ms)"),
    *("Avg comm lat(ms)", "Avg straggler(ms)", "Slowest rank"),
)


def get_caller_func(frame: int = 3) -> str:
    """Return the name of the function `frame` levels up the stack."""
    try:
        return sys._getframe(frame).f_code.co_name
    except ValueError:  # the stack is not that deep
        return "<module>"


def print_rank_0(message: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message)


def convert_size(size_bytes: int) -> str:
    """Format bytes in powers of 1024: 1536 -> "1.5 KB"."""
    if size_bytes == 0:
        return "0B"
    size, unit = float(size_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{round(size, 2)} {_UNITS[unit]}"


def calc_bw_log(
    comm_op: str, size: int, duration: float, group_size: int | None = None
) -> tuple[float, float]:
    """Return algorithm and bus bandwidth in Gbps of one call that took `duration` ms.

    `size` is one rank's contribution in bytes (all_gather: its input, reduce_scatter: its output). The bus bandwidth
    is a ring's traffic per link: 2 (n-1)/n for an all_reduce, (n-1)/n for operations that gather, scatter or
    exchange, everything for the rest (the convention of the NCCL tests).
    """
    n = group_size or (dist.get_world_size() if dist.is_initialized() else 1)
    if duration <= 0:
        return 0.0, 0.0
    gbps = size * 8 / duration / 1e6
    if "all_to_all" in comm_op:
        return gbps, gbps * (n - 1) / n
    if any(name in comm_op for name in _GATHERING) or comm_op == "allgather_fn":
        return gbps * n, gbps * (n - 1)
    if "all_reduce" in comm_op:
        return gbps * 2, gbps * 2 * (n - 1) / n
    return gbps, gbps


class CommsLogger:
    """Log of `deepspeed.comm` calls, per operation and message size."""

    def __init__(self) -> None:
        self.comms_dict: dict[str, SizeRecords] = {}
        self.verbose = False
        self.debug = False
        self.prof_ops: list[str] = []
        self.prof_all = True
        self.enabled = False
        self.links: Callable[[], dict[str, float]] | None = None
        """Returns the bytes that an engine sent, by link."""

    def configure(self, comms_config: Any) -> None:
        """Apply a `comms_logger` section (or an object that holds one as `.comms_logger`)."""
        section = getattr(comms_config, "comms_logger", comms_config)
        self.enabled = section.enabled
        self.prof_all = section.prof_all
        self.prof_ops = list(section.prof_ops)
        self.verbose = section.verbose
        self.debug = section.debug

    def start_profiling_comms(self) -> None:
        """Record every operation."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Record only the operations named by `start_profiling_op`."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        self.prof_ops = list({*self.prof_ops, *op_name_list})

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        stopped = set(op_name_list)
        self.prof_ops = [name for name in self.prof_ops if name not in stopped]

    def wants(self, op_name: str) -> bool:
        """Return whether calls of this operation are recorded."""
        return self.enabled and (self.prof_all or op_name in self.prof_ops)

    def append(
        self, raw_name: str, record_name: str, latency: float, msg_size: int, group_size: int | None = None
    ) -> None:
        """Record one call: `raw_name` is the operation, `record_name` its row in the log, `latency` in ms, `msg_size`
        in bytes as for `calc_bw_log`."""
        algbw, busbw = calc_bw_log(raw_name, msg_size, latency, group_size)
        record = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        record[0] += 1
        for values, value in zip(record[1:], (latency, algbw, busbw), strict=True):
            values.append(value)
        if self.verbose:
            rank = dist.get_rank() if dist.is_initialized() else 0
            logger.info(
                f"comm op: {record_name} | rank: {rank} | time (ms): {latency:.2f} | "
                f"msg size: {convert_size(msg_size)} | algbw (Gbps): {algbw:.2f} | busbw (Gbps): {busbw:.2f}"
            )

    def get_raw_data(self) -> dict[str, SizeRecords]:
        return {
            name: {size: list(record) for size, record in sizes.items()}
            for name, sizes in self.comms_dict.items()
        }

    def has_data(self) -> bool:
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        self.comms_dict.clear()

    def get_operation_names(self) -> list[str]:
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        return sum(record[0] for sizes in self.comms_dict.values() for record in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]]:
        """Return counts, latencies and mean bandwidths of one operation by message size; {} if never recorded."""
        return {
            size: _summary(size, record)
            for size, record in sorted(self.comms_dict.get(operation_name, {}).items())
        }

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print the table (if `print_log`) and return the numbers (if `return_dict`).

        With `show_straggler` all ranks call this: they exchange their latencies.
        """
        summary = {name: self.get_operation_summary(name) for name in self.comms_dict}
        stragglers = self._straggler_analysis() if show_straggler else None
        links = self.links() if self.links is not None else None
        if print_log:
            print(_table(_TABLE_HEAD, summary))
            if links is not None:
                print(_links_line(links))
            if stragglers is not None:
                print(f"{'_' * 31}\nBreakdown with straggler effect\n{'-' * 31}")
                print(_table(_STRAGGLER_HEAD, stragglers))
        if not return_dict:
            return None
        initialized = dist.is_initialized()
        return {
            "summary": summary,
            "straggler_analysis": stragglers,
            **({} if links is None else {"links": links}),
            "metadata": {
                "world_size": dist.get_world_size() if initialized else 1,
                "rank": dist.get_rank() if initialized else 0,
                "timestamp": datetime.now().isoformat(),
            },
        }

    def _straggler_analysis(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Return straggler statistics by operation and size. In the i-th call the rank that arrived last waited
        least: the smallest latency over ranks is the communication, and the extra time of the longest-waiting rank is
        due to the straggler. Calls whose numbers differ between ranks (send, subgroups) are compared among the ranks
        that recorded as many as this one."""
        mine = {
            name: {size: record[1] for size, record in sizes.items()}
            for name, sizes in self.comms_dict.items()
        }
        everyone: list[Any] = [mine]
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
        return {
            name: {
                size: _straggler_summary(name, size, latencies, everyone)
                for size, latencies in sorted(sizes.items())
            }
            for name, sizes in mine.items()
        }


def _summary(size: int, record: list[Any]) -> dict[str, Any]:
    count, latencies, algbws, busbws = record
    return {
        "count": count,
        "total_latency_ms": sum(latencies),
        "avg_latency_ms": fmean(latencies),
        "tput_avg_gbps": fmean(algbws),
        "busbw_avg_gbps": fmean(busbws),
        "msg_size_bytes": size,
        "msg_size_str": convert_size(size),
    }


def _straggler_summary(name: str, size: int, latencies: list[float], everyone: list[Any]) -> dict[str, Any]:
    by_rank = {rank: logs.get(name, {}).get(size) or [] for rank, logs in enumerate(everyone)}
    comparable = {rank: values for rank, values in by_rank.items() if len(values) == len(latencies)}
    calls = list(zip(*comparable.values(), strict=True))
    communication = sum(min(call) for call in calls)
    waiting = sum(max(call) - min(call) for call in calls)
    return {
        "count": len(calls),
        "total_comm_lat_ms": communication,
        "total_straggler_ms": waiting,
        "avg_comm_lat_ms": communication / len(calls),
        "avg_straggler_ms": waiting / len(calls),
        "slowest_rank": min(comparable, key=lambda rank: sum(comparable[rank])),
        "msg_size_bytes": size,
        "msg_size_str": convert_size(size),
    }


def _links_line(links: dict[str, float]) -> str:
    kinds = (("within its host", "bytes_within_host"), ("across hosts", "bytes_across_hosts"))
    sent = [
        f"{convert_size(int(links[name]))} {kind} ({convert_size(int(links[f'{name}_per_step']))} per step)"
        for kind, name in kinds
    ]
    return f"Sent by this rank in {links['steps']:.0f} steps: {', '.join(sent)}"


def _table(head: tuple[str, ...], rows: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Format a table; the columns of `head` after the size are the values of a row, in order."""
    lines = ["".join(f"{title:<20}" for title in ("Comm. Op", *head))]
    for name, sizes in rows.items():
        lines.append(name)
        for entry in sizes.values():
            values = [value for key, value in entry.items() if not key.startswith("msg_size")]
            cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in values]
            lines.append("".join(f"{cell:<20}" for cell in ("", entry["msg_size_str"], *cells)))
    return "\n".join(lines)
