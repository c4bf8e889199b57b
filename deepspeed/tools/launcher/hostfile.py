"""Selection of devices on machines: hostfiles (``worker-0 slots=4``) and the include and exclude grammar.
No torch, no network.

    NODE_SPEC[@NODE_SPEC ...]   with NODE_SPEC = NAME[:SLOT[,SLOT ...]]; a slot may be a range such as 0-3

A *slot* is a device of one machine; without ``:SLOT`` all slots of the machine are meant.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from deepspeed.base.tables import counted
from deepspeed.tools.launcher.errors import LaunchError

HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*")
MAX_SLOTS = 4096
"""Limit per machine: a larger number is a mistake, and would be expanded into a list of slots."""
MAX_DIGITS = 5
HOST_LINE = re.compile(r"^(\S+)\s+slots=(\d+)\s*$")


def fetch_hostfile(hostfile_path: str | None) -> OrderedDict[str, int] | None:
    """Read host name -> number of slots, in file order; None if the file does not exist. Raises LaunchError."""
    if not hostfile_path or not os.path.isfile(hostfile_path):
        return None
    try:
        with open(hostfile_path, encoding="utf-8") as file:
            lines = file.readlines()
    except UnicodeDecodeError:
        raise LaunchError(
            f"{hostfile_path} is not text in UTF-8; a hostfile has lines 'HOST slots=N'"
        ) from None
    except OSError as error:
        raise LaunchError(f"the hostfile {hostfile_path}: {error.strerror or error}") from None
    return _parse_hostfile(lines)


def _parse_hostfile(hostfile_lines: Iterable[str]) -> OrderedDict[str, int]:
    """Parse host -> slots. Raises ValueError for a malformed line, a host named twice, or a file without hosts."""
    hosts: OrderedDict[str, int] = OrderedDict()
    for number, line in enumerate(hostfile_lines, start=1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        match = HOST_LINE.match(text)
        if match is None:
            raise LaunchError(f"hostfile line {number} is {text!r}; each line must read 'HOST slots=N'")
        host = match.group(1)
        slots = checked_slots(match.group(2), f"hostfile line {number}, {text!r}")
        if host in hosts:
            raise LaunchError(f"hostfile line {number} repeats host {host!r}; write one line per host")
        hosts[host] = slots
    if not hosts:
        raise LaunchError("the hostfile has no hosts; write at least one line 'HOST slots=N'")
    return hosts


def checked_slots(given: str | int, where: str) -> int:
    """Return the number of slots of one machine. Raises LaunchError, which begins with ``where``, if it is out of
    range."""
    digits = str(given).lstrip("0")
    if not digits:
        raise LaunchError(f"{where}: a host needs at least one slot; remove unused hosts")
    if len(digits) > len(str(MAX_SLOTS)) or int(digits) > MAX_SLOTS:
        raise LaunchError(
            f"{where}: a host has at most {MAX_SLOTS} slots, one for each of its devices or ranks"
        )
    return int(digits)


def checked_host(host: str) -> str:
    """Return the host name if it is valid: with other characters, ssh, pdsh or mpirun could take it for an option or a
    list. Raises LaunchError."""
    if not HOST_NAME.fullmatch(host):
        raise LaunchError(
            f"the host name {host!r} may only contain letters, digits and '_.:@-', and must start with a "
            "letter or digit"
        )
    return host


def parse_range_list(text: str) -> list[int]:
    """Parse ``"1,3-5,7"`` to ``[1, 3, 4, 5, 7]``, in the order given. Raises LaunchError for a repeated number."""
    numbers = parse_ranges(text)
    repeated = next((number for number in numbers if numbers.count(number) > 1), None)
    if repeated is not None:
        raise LaunchError(f"{text!r} lists {repeated} twice")
    return numbers


def parse_ranges(text: str) -> list[int]:
    """Parse ``"1,3-5,1"`` to ``[1, 3, 4, 5, 1]``. Raises LaunchError."""
    numbers: list[int] = []
    for part in text.split(","):
        bounds = part.strip().split("-")
        if not (1 <= len(bounds) <= 2 and all(bound.strip().isdigit() for bound in bounds)):
            raise LaunchError(f"{text!r} is not a list of numbers and ranges such as 0,2-5 (at {part!r})")
        if any(len(bound.strip().lstrip("0")) > MAX_DIGITS for bound in bounds):
            raise LaunchError(f"{part.strip()!r} in {text!r}: numbers have at most {MAX_DIGITS} digits")
        low, high = int(bounds[0]), int(bounds[-1])
        if high < low:
            raise LaunchError(f"the range {part.strip()!r} in {text!r} is reversed")
        numbers.extend(range(low, high + 1))
    return numbers


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """Parse ``"worker-0:0,2"`` to ``("worker-0", [0, 2])``, each slot once; without slots, an empty list."""
    name, colon, slots = node_config.strip().partition(":")
    if not name or (colon and not slots):
        raise LaunchError(f"{node_config!r} is not of the form NAME or NAME:SLOT[,SLOT ...]")
    return name, list(dict.fromkeys(parse_ranges(slots))) if colon else []


def parse_node_config_list(node_config_list: Sequence[str]) -> dict[str, list[int]]:
    """Parse several node specs into host -> slots. Specs of the same host are merged: ``a:0@a:1`` is ``a:0,1``, and
    ``a@a:1`` is all of ``a``, an empty list. Slots keep the given order; if specs repeat a slot, they are sorted.
    """
    specs: dict[str, list[int]] = {}
    for name, slots in map(parse_node_config, node_config_list):
        before = specs.get(name, slots)
        joined = slots if name not in specs else [*before, *slots]
        joined = sorted(set(joined)) if len(set(joined)) < len(joined) else joined
        specs[name] = joined if before and slots else []
    return specs


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int] | int], include_str: str = "", exclude_str: str = ""
) -> OrderedDict[str, list[int]]:
    """Return the part of ``host_info`` (host -> slots, or their number) that passes the filter.

    Hosts keep the order of ``host_info``, included slots the order given (the order of the ranks); hosts without
    slots are dropped. Raises ValueError if both filters are given, or one names a host or slot that does not
    exist.
    """
    if include_str and exclude_str:
        raise LaunchError("include and exclude are mutually exclusive: give one of them")
    pool = OrderedDict(
        (host, list(range(s)) if isinstance(s, int) else list(s)) for host, s in host_info.items()
    )
    if not include_str and not exclude_str:
        return pool
    named = parse_node_config_list((include_str or exclude_str).split("@"))
    for host, slots in named.items():
        if host not in pool:
            raise LaunchError(f"host {host!r} is not among those available: {', '.join(pool)}")
        missing = [slot for slot in slots if slot not in pool[host]]
        if missing:
            raise LaunchError(
                f"No slot '{missing[0]}' specified on host '{host}': it has {_spell(pool[host])}"
            )
    for host, slots in pool.items():
        chosen = (named[host] or slots) if host in named else []
        pool[host] = chosen if include_str else [slot for slot in slots if slot not in chosen]
    return OrderedDict((host, slots) for host, slots in pool.items() if slots)


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> OrderedDict[str, list[int]]:
    """Apply `parse_resource_filter` to a pool of slot counts, as `fetch_hostfile` returns it."""
    return parse_resource_filter(resource_pool, include_str=inclusion, exclude_str=exclusion)


def apply_num_nodes_and_gpus(
    active_resources: Mapping[str, Sequence[int]], num_nodes: int, num_gpus: int
) -> OrderedDict[str, list[int]]:
    """Return the first ``num_nodes`` hosts, each with its first ``num_gpus`` slots; a number below 1 means all. Raises
    LaunchError if there are fewer."""
    if num_nodes > len(active_resources):
        raise LaunchError(
            f"--num_nodes={num_nodes}: only {counted(len(active_resources), 'host')} available "
            f"({', '.join(list(active_resources)[:8])}); add more to the hostfile, or request fewer"
        )
    hosts = list(active_resources.items())[: num_nodes if num_nodes > 0 else None]
    for host, slots in hosts:
        if num_gpus > len(slots):
            raise LaunchError(f"--num_gpus={num_gpus}: host {host!r} has only {counted(len(slots), 'slot')}")
    return OrderedDict((host, list(slots[: num_gpus if num_gpus > 0 else None])) for host, slots in hosts)


def _spell(slots: Sequence[int]) -> str:
    return "slots " + ", ".join(map(str, slots)) if slots else "no slots"
