"""Known networks and devices, with the sources of their numbers; JSON files describe others.

Rates come from data sheets, per direction; ``share`` is the fraction of them that programs reach. Shares that no data
sheet states are assumptions, and marked as such.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from deepspeed.base.exceptions import ExplainedError

ETHERNET_SHARE = 1448 / 1538
"""Payload share of a full frame: 1,448 bytes (TCP with time stamps) of 1,538 with headers, preamble and gap."""


class HardwareError(ExplainedError, ValueError):
    """A network or device is unknown, or its file is malformed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """A network. ``rate``: bytes per second and direction, of a node or (``per_device``) of each device in it;
    ``share``: fraction that payload reaches. ``latency``: seconds per message. ``burst``: bytes that pass at ``peak``
    bytes per second after a rest, if a token bucket limits the rate."""

    name: str
    rate: float
    share: float = 1.0
    latency: float = 0.0
    per_device: bool = False
    burst: float = 0.0
    peak: float = 0.0
    source: str = ""

    @property
    def payload_rate(self) -> float:
        return self.rate * self.share


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device. ``flops``: peak dense 16-bit FLOP/s; ``share``: fraction that a step reaches while it computes.
    ``memory_rate``: memory bandwidth for updates; ``memory``: bytes. ``inside``: network within a node; ``host_rate``:
    bandwidth to host memory per direction; ``storage_rate``: of storage. Rates are bytes per second. ``launch``:
    seconds per call; ``host_update``: seconds per element of an update on the host."""

    name: str
    flops: float
    share: float
    memory_rate: float
    memory: int
    inside: str
    host_rate: float
    launch: float = 1e-5
    host_update: float = 2e-9
    storage_rate: float = 3e9
    source: str = ""


def _ethernet(gbits: float, latency: float) -> NetworkSpec:
    return NetworkSpec(
        name=f"{gbits:g}GbE",
        rate=gbits * 1e9 / 8,
        share=ETHERNET_SHARE,
        latency=latency,
        source="IEEE 802.3 line rate, TCP over IPv4; latency: assumed",
    )


def _infiniband(name: str, gbits: int, card: str) -> NetworkSpec:
    return NetworkSpec(
        name=name,
        rate=gbits * 1e9 / 8,
        share=0.92,
        latency=5e-6,
        per_device=True,
        source=f"InfiniBand {name}, {gbits} Gbit/s a port (NVIDIA {card} data sheet), one per device; share: assumed",
    )


def _nvlink(name: str, gbytes: int, device: str) -> NetworkSpec:
    """Build an NVLink network. ``gbytes``: GB/s of both directions together."""
    return NetworkSpec(
        name=name,
        rate=gbytes * 1e9 / 2,
        share=0.78,
        latency=1e-5,
        per_device=True,
        source=f"NVIDIA {device} data sheet: {gbytes} GB/s bidirectional; share: assumed",
    )


NETWORKS: Mapping[str, NetworkSpec] = {
    network.name.lower(): network
    for network in (
        _ethernet(1, 1e-4),
        _ethernet(10, 5e-5),
        _ethernet(25, 3e-5),
        _ethernet(100, 2e-5),
        _infiniband("HDR", 200, "ConnectX-6"),
        _infiniband("NDR", 400, "ConnectX-7"),
        _nvlink("NVLink3", 600, "A100"),
        _nvlink("NVLink4", 900, "H100 SXM"),
    )
}

DEVICES: Mapping[str, Device] = {
    device.name.lower(): device
    for device in (
        Device(
            name="A100",
            flops=312e12,
            share=0.5,
            memory_rate=2.039e12,
            memory=80 * 10**9,
            inside="NVLink3",
            host_rate=25e9,
            source="NVIDIA A100 80GB SXM data sheet: bf16 dense, HBM2e, PCIe 4 x16; share: assumed",
        ),
        Device(
            name="H100",
            flops=989e12,
            share=0.45,
            memory_rate=3.35e12,
            memory=80 * 10**9,
            inside="NVLink4",
            host_rate=50e9,
            source="NVIDIA H100 SXM data sheet: bf16 dense, HBM3, PCIe 5 x16; share: assumed",
        ),
    )
}

Spec = TypeVar("Spec", NetworkSpec, Device)


def network(name: str) -> NetworkSpec:
    """Look up a network: a known name (any case), a rate such as "100Mbit" or "40Gbit", or a JSON file with the fields
    of ``NetworkSpec``."""
    text = name.lower()
    for unit, factor in (("mbit", 1e6), ("gbit", 1e9)):
        if text.endswith(unit):
            return _of_rate(name, text[: -len(unit)], factor)
    return _found(name, NETWORKS, NetworkSpec, "--network")


def _of_rate(name: str, number: str, factor: float) -> NetworkSpec:
    try:
        rate = float(number) * factor / 8
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise HardwareError(f"--network {name}: expected a rate above 0, such as 100Mbit")
    return NetworkSpec(
        name=name, rate=rate, share=ETHERNET_SHARE, latency=5e-5, source="as given; TCP over Ethernet"
    )


def device(name: str) -> Device:
    """Look up a device: a known name (any case), or a JSON file with the fields of ``Device``."""
    return _found(name, DEVICES, Device, "--on")


def _found(name: str, known: Mapping[str, Spec], kind: type[Spec], option: str) -> Spec:
    if name.lower() in known:
        return known[name.lower()]
    path = Path(name)
    if not path.is_file():
        names = ", ".join(thing.name for thing in known.values())
        raise HardwareError(
            f"{option} {name}: neither a known name ({names}) nor a JSON file with the fields of a {kind.__name__}"
        )
    return _read(path, kind, option)


def _read(path: Path, kind: type[Spec], option: str) -> Spec:
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HardwareError(f"{option} {path}: not JSON ({error})") from None
    allowed = {field.name for field in fields(kind)}
    if not isinstance(data, dict) or not data.keys() <= allowed:
        extra = sorted(data.keys() - allowed) if isinstance(data, dict) else [type(data).__name__]
        raise HardwareError(
            f"{option} {path}: {', '.join(extra)} is not a field of {kind.__name__}; expected "
            f"{', '.join(sorted(allowed))}"
        )
    texts = {"name", "source", "inside", "per_device"}
    bad = [
        key
        for key, value in data.items()
        if key not in texts and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0)
    ]
    if bad:
        raise HardwareError(f"{option} {path}: {bad[0]}={data[bad[0]]!r}: expected a number, 0 or more")
    positive = {"rate", "share", "flops", "memory_rate", "host_rate", "storage_rate"}
    zero = sorted(key for key in positive & data.keys() if data[key] == 0)
    if zero:
        raise HardwareError(f"{option} {path}: {zero[0]}=0: expected a number above 0")
    try:
        return kind(**{"name": path.stem, **data})
    except TypeError as error:
        raise HardwareError(f"{option} {path}: {error}") from None
