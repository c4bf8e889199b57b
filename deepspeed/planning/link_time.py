"""Step time over a slow link between nodes: with the config unchanged, and with each option that sends less.

Only inter-node traffic counts: sums and gathers run within a node first, as the collectives of this package do on CPUs
and NCCL does on GPUs. No overlap with compute is assumed, which overestimates times; encoding time is left out, which
underestimates them on fast links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.ops.formats.codecs import Codec, codec_named
from deepspeed.planning.request import PlanAnswer

ENOUGH = 0.1
"""Share of the compute time that communication may take before an option that loses more precision is worth it."""
SYNC_EVERY, LOCAL_STEPS = 100, 16
_SAMPLE = 1 << 20


@dataclass(frozen=True, slots=True)
class Option:
    """A change of the config. ``nbytes``: bytes that a node sends per step."""

    name: str
    change: str
    nbytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """Step times by option. ``options``: the config unchanged, then the changes in order of lost precision.
    ``compute``: seconds per step; ``bandwidth``: bytes per second."""

    options: Sequence[Option]
    compute: float
    bandwidth: float

    def seconds(self, option: Option) -> float:
        return self.compute + option.nbytes / self.bandwidth

    @property
    def recommended(self) -> Option:
        """The first option whose communication takes at most ``ENOUGH`` of the compute time; else the fastest."""
        enough = [o for o in self.options if o.nbytes / self.bandwidth <= ENOUGH * self.compute]
        return enough[0] if enough else min(self.options, key=lambda option: option.nbytes)

    def lines(self) -> list[str]:
        now, best = self.seconds(self.options[0]), self.recommended
        result = [
            f"a step over {self.bandwidth * 8 / 1e6:g} Mbit/s between nodes, with {self.compute:g} s of "
            "compute, without overlap (estimated):"
        ]
        width = max(len(option.name) for option in self.options)
        for option in self.options:
            seconds = self.seconds(option)
            result.append(
                f"  {option.name:<{width}}  {option.nbytes / 1e6:10,.2f} MB  {seconds:8.3f} s  {now / seconds:6.2f} x"
            )
        remedy = f": {best.change}" if best.change else ""
        return [*result, f"recommended: {best.name}{remedy}"]

    def as_json(self) -> dict[str, Any]:
        return {
            "options": [
                {"name": o.name, "change": o.change, "bytes": o.nbytes, "seconds": self.seconds(o)}
                for o in self.options
            ],
            "recommended": self.recommended.name,
        }


def link_times(found: PlanAnswer, compute: float, bandwidth: float) -> LinkTimes:
    """Compute step times over the links between the request's nodes. ``compute``: seconds per step; ``bandwidth``: of a
    node's link, in bytes per second."""
    nodes, setting = found.request.nodes, found.setting
    specs = setting.model.specs[: setting.model.trained]
    numel = sum(spec.numel for spec in specs)
    weights = sum(spec.numel * spec.dtype.itemsize for spec in specs) / max(numel, 1)
    reduced = found.plan.precision.reduce
    gradients = float(reduced.itemsize) if reduced is not None else weights
    make = _with_shards if found.plan.zero.shard_params else _with_whole_weights
    per_element = make(found, weights, gradients)
    share = (nodes - 1) / nodes  # of the exchanged data, the part that leaves one node
    options = [Option(name, change, share * numel * nbytes) for name, change, nbytes in per_element]
    return LinkTimes(options=options, compute=compute, bandwidth=bandwidth)


def bytes_per_element(codec: Codec) -> float:
    """Return the encoded bytes per element, including scales."""
    return codec.nbytes(_SAMPLE) / _SAMPLE


def _with_whole_weights(found: PlanAnswer, weights: float, gradients: float) -> list[tuple[str, str, float]]:
    """List (name, change, bytes per element) for stages 0 to 2: a gradient reduce-scatter, then an all-gather of sums
    (stage 0) or weights."""
    zero, packing = found.plan.zero, found.plan.packing
    int8, int4, signs = (bytes_per_element(codec_named(name)) for name in ("int8", "int4", "signs"))
    sums = found.setting.micro_batches if zero.shard_grads else 1
    back = weights if zero.shard_state else gradients
    now = gradients * sums + back
    if packing.codec is not None:
        way = bytes_per_element(packing.codec)
        now = way * sums + (weights if zero.shard_state else way)
    elif packing.gradients:
        now = int4 * sums + weights
    exchanged = {"OneBitAdam": 2 * signs, "ZeroOneAdam": 2 * signs / LOCAL_STEPS, "DiLoCo": 8.0 / SYNC_EVERY}
    kind = str(found.config.optimizer_name or "").lower()
    now = {name.lower(): nbytes for name, nbytes in exchanged.items()}.get(kind, now)
    options = [("as it is", "", now)]
    for name, way in (("int8", int8), ("int4", int4)):
        nbytes = way * sums + (weights if zero.shard_state else way)
        options.append((f"gradients in {name}", f'gradient_compression: {{"codec": "{name}"}}', nbytes))
    copies = ", zero_optimization.mics_shard_size: the ranks of a node" if zero.shard_state else ""
    for name, nbytes in exchanged.items():
        options.append((f"{name} after warm-up", f"optimizer.type: {name}{copies}", nbytes))
    return options


def _with_shards(found: PlanAnswer, weights: float, gradients: float) -> list[tuple[str, str, float]]:
    """List (name, change, bytes per element) for stage 3: two gathers and a gradient sum per micro-batch; with hpZ, a
    single gather per step."""
    packing, sums = found.plan.packing, found.setting.micro_batches
    int8, int4 = (bytes_per_element(codec_named(name)) for name in ("int8", "int4"))
    key = "zero_optimization."

    def total(way_of_weights: float, way_of_gradients: float, groups: bool) -> float:
        return (1 if groups else 2 * sums) * way_of_weights + sums * way_of_gradients

    now_weights = {0: weights, 4: int4, 8: int8}[packing.weights]
    now_gradients = int4 if packing.gradients else gradients
    if packing.codec is not None:
        now_gradients = bytes_per_element(packing.codec)
    hpz = f"{key}zero_hpz_partition_size: the ranks of a node"
    qwz, qgz = f"{key}zero_quantized_weights", f"{key}zero_quantized_gradients"
    return [
        ("as it is", "", total(now_weights, now_gradients, packing.group > 1)),
        ("hpZ", hpz, total(weights, gradients, True)),
        ("hpZ, qwZ", f"{hpz}, {qwz}", total(int8, gradients, True)),
        ("hpZ, qwZ, qgZ", f"{hpz}, {qwz}, {qgz}", total(int8, int4, True)),
        ("hpZ, qwZ in 4 bits, qgZ", f"{hpz}, {qwz}, {qwz}_bits: 4, {qgz}", total(int4, int4, True)),
    ]
