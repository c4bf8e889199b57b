"""The printed form of a profile, as documented in the flops profiler's tutorial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TextIO

from torch import nn

from deepspeed.base.tables import padded
from deepspeed.observe.flops import counting

# Number formats of the profile: rounded, with an SI prefix.


DEFAULT_PRECISION = 2

_LARGE = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3))
_SMALL = (("m", 1e-3), ("u", 1e-6))
_PREFIXES = {"": 1.0, "k": 1e3, "B": 1e9, "n": 1e-9, **dict(_LARGE), **dict(_SMALL)}


def number_to_string(num: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Format ``1234`` as ``"1.23 K"`` and ``7e9`` as ``"7 G"``; ``units`` fixes the prefix: T, G, M, K, m, u, or none
    (``""``)."""
    prefix = _prefix_for(num) if units is None else units
    if prefix not in _PREFIXES:
        raise ValueError(f"units={units!r}: must be one of {', '.join(map(repr, _PREFIXES))}")
    scaled = num if _PREFIXES[prefix] == 1.0 else num / _PREFIXES[prefix]
    rounded = round(scaled, precision)
    return f"{int(rounded) if float(rounded).is_integer() else rounded} {prefix}"


def _prefix_for(num: float) -> str:
    size = abs(num)
    if size >= 1 or size == 0:
        return next((prefix for prefix, value in _LARGE if size >= value), "")
    return next((prefix for prefix, value in _SMALL if size >= value), _SMALL[-1][0])


def flops_to_string(flops: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Format floating-point operations per second: ``"81.9 TFLOPS"``."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Format a number of MACs: ``"3139.93 GMACs"``."""
    return f"{number_to_string(macs, units, precision)}MACs"


def bytes_to_string(b: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Format bytes in powers of 1000: ``"1.5 MB"``."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Format a number of parameters: ``"336.23 M"``; billions are ``B``."""
    text = number_to_string(params_num, units.replace("B", "G") if units else units, precision)
    return text.replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Format seconds: ``"76.67 ms"``; ``units``: s, ms or us."""
    prefix = units
    if units is not None:
        prefix = units.removesuffix("s")
    elif abs(duration) >= 1:
        prefix = ""  # no kiloseconds
    return f"{number_to_string(duration, prefix, precision)}s"


TITLE = "-------------------------- DeepSpeed Flops Profiler --------------------------"
AGGREGATED = "----------------------------- Aggregated Profile per GPU -----------------------------"
DETAILED = "------------------------------ Detailed Profile per GPU ------------------------------"
MEMORY = "------------------------------ Memory Profile per GPU ------------------------------"
END = "------------------------------------------------------------------------------"
NOTATIONS = """Notations:
data parallel size (dp_size), model parallel size(mp_size),
number of parameters (params), number of multiply-accumulate operations(MACs),
number of floating-point operations (flops), floating-point operations per second (FLOPS),
fwd latency (forward propagation latency), bwd latency (backward propagation latency),
step (weights update latency), iter latency (sum of fwd, bwd and step latency)"""
ORDER = """Each module profile is listed after its name in the following order:
params, percentage of total params, MACs, percentage of total MACs, fwd latency, percentage of total fwd latency, \
fwd FLOPS"""
NOTES = """Note: 1. A module can have torch.nn.module or torch.nn.functional to compute logits (e.g. \
CrossEntropyLoss). They are not counted as submodules, thus not to be printed out. However they make up the difference \
between a parent's MACs (or latency) and the sum of its submodules'.
2. Number of floating-point operations is a theoretical estimation, thus FLOPS computed using that could be larger \
than the maximum system throughput.
3. The fwd latency listed in the top module's profile is directly captured at the module forward function in PyTorch, \
thus it's less than the fwd latency shown above which is captured in DeepSpeed."""
WIDTH = 70
MAX_RANKS = 64
"""Maximum number of ranks with their own line in the report."""


@dataclass(frozen=True)
class ModuleTimes:
    """Seconds of a micro-batch's forward and backward, and of the update."""

    forward: float
    backward: float
    step: float


@dataclass(frozen=True)
class RankCounts:
    """World sizes of the profiled engine, and counts over all ranks."""

    world: int
    data: int
    model: int
    batch: int
    """Samples per micro-batch and rank."""
    forward_flops: int
    """Forward flops of one micro-batch, summed over all ranks."""
    by_rank: tuple[tuple[int, ...], ...] = ()
    """By rank: params, flops of forward, backward and recomputation, bytes held, peak bytes. Empty: unknown."""
    copies: int = 1
    """Number of data-parallel replicas, which do the same work on different data."""


@dataclass(frozen=True)
class FlopsTotals:
    """Totals of one rank for one micro-batch."""

    params: int
    forward: counting.WorkCount
    backward: counting.WorkCount
    recomputed: counting.WorkCount
    seconds: float
    """Time of the forward, measured at the module."""
    weights: int = 0
    """Bytes of parameters and buffers."""
    held: int = 0
    """Bytes that the forward allocated and left alive."""
    peak: int = 0
    """Largest number of bytes allocated by the forward that were alive at once."""


def ranks_of(engine: Any, totals: FlopsTotals) -> RankCounts:
    """Return the rank counts without communication, assuming equal work on all ranks. Sequence-parallel ranks count as
    data-parallel ones if the engine has no data-parallel size."""
    data = engine.dp_world_size
    if data is None:
        data = engine.seq_dp_world_size
    forward = totals.forward.flops * engine.world_size
    return RankCounts(
        engine.world_size, data, engine.mp_world_size, engine.train_micro_batch_size_per_gpu(), forward
    )


def rate(flops: float, seconds: float) -> str:
    return flops_to_string(flops / seconds if seconds else 0.0)


def _lines(*rows: tuple[str, object]) -> list[str]:
    return [f"{label:<{WIDTH}} {value}" for label, value in rows]


def _number(value: float) -> str:
    return number_to_string(value).strip()


def summary(
    totals: FlopsTotals, step: int, recompute: float, times: ModuleTimes | None, ranks: RankCounts | None
) -> list[str]:
    """Return the lines of the profile's summary."""
    lines = ["", TITLE, f"Profile Summary at step {step}:", NOTATIONS, ""]
    if ranks is not None:
        lines += _lines(
            ("world size:", ranks.world),
            ("data parallel size:", ranks.data),
            ("model parallel size:", ranks.model),
            ("batch size per GPU:", ranks.batch),
        )
    model_parallel = ranks.model if ranks is not None else 1
    flops = totals.forward.flops
    forward_s = times.forward if times is not None else totals.seconds
    lines += _lines(
        ("params per gpu:", params_to_string(totals.params)),
        ("params of model = params per GPU * mp_size:", params_to_string(totals.params * model_parallel)),
        ("fwd MACs per GPU:", _number(totals.forward.macs)),
        ("fwd flops per GPU:", _number(flops)),
        ("fwd flops of model = fwd flops per GPU * mp_size:", _number(flops * model_parallel)),
        ("fwd latency:", duration_to_string(forward_s)),
    )
    if times is not None:
        lines += _lines(("bwd latency:", duration_to_string(times.backward)))
    lines += _lines(("fwd FLOPS per GPU = fwd flops per GPU / fwd latency:", rate(flops, forward_s)))
    if times is not None:
        lines += _iteration(flops, times, recompute, ranks)
    return [*lines, *_counted(totals, times, ranks)]


def _iteration(flops: int, times: ModuleTimes, recompute: float, ranks: RankCounts | None) -> list[str]:
    """Return the lines on backward and step; as documented, a backward is assumed to take twice the forward's flops."""
    backward, both = 2 + recompute, 3 + recompute
    together = times.forward + times.backward
    iteration = together + times.step
    back, whole = f"{backward:g} * fwd flops per GPU", f"{both:g} * fwd flops per GPU"
    lines = _lines(
        (f"bwd FLOPS per GPU = {back} / bwd latency:", rate(backward * flops, times.backward)),
        (f"fwd+bwd FLOPS per GPU = {whole} / (fwd+bwd latency):", rate(both * flops, together)),
        ("step latency:", duration_to_string(times.step)),
        ("iter latency:", duration_to_string(iteration)),
    )
    if ranks is not None:
        samples = ranks.batch * ranks.data / iteration if iteration else 0.0
        lines += _lines(("samples/second:", round(samples, 2)))
    return lines


def _counted(totals: FlopsTotals, times: ModuleTimes | None, ranks: RankCounts | None) -> list[str]:
    """Return lines with counted values, where the documented lines assume them."""
    lines = []
    back, again = totals.backward.flops, totals.recomputed.flops
    if back:
        lines += ["", *_lines(("bwd flops per GPU, counted:", _number(back)))]
        if again:
            lines += _lines(("recomputed fwd flops per GPU, counted:", _number(again)))
        if times is not None:
            speed = rate(back + again, times.backward)
            lines += _lines(("bwd FLOPS per GPU = counted flops / bwd latency:", speed))
    if ranks is not None and ranks.world > 1:
        lines += _lines(("fwd flops of all ranks, counted:", _number(ranks.forward_flops)))
        lines += _every_rank(ranks)
    return lines + _lines(
        ("weights and buffers per GPU:", bytes_to_string(totals.weights)),
        ("activations per GPU, held after fwd:", bytes_to_string(totals.held)),
        ("activations per GPU, peak in fwd:", bytes_to_string(totals.peak)),
    )


def _every_rank(ranks: RankCounts) -> list[str]:
    """Return the line for the whole model, and a line per rank if ranks differ."""
    if not ranks.by_rank:
        return []
    forward = _number(sum(row[1] for row in ranks.by_rank) / ranks.copies)
    lines = _lines(("fwd flops of the whole model for one batch of a data-parallel rank, counted:", forward))
    if len(set(ranks.by_rank)) == 1:
        return lines
    for rank, (params, fwd, bwd, again, held, peak) in enumerate(ranks.by_rank[:MAX_RANKS]):
        lines.append(
            f"  rank {rank}: params {params_to_string(params)}, fwd flops {_number(fwd)}, "
            f"bwd flops {_number(bwd + again)}, held {bytes_to_string(held)}, peak {bytes_to_string(peak)}"
        )
    return lines


def memory(model: nn.Module) -> list[str]:
    """Return a table by module: bytes of weights, bytes held after its forward, peak bytes in its forward."""
    rows: list[tuple[str, ...]] = [("module", "class", "weights", "held after fwd", "peak in fwd")]
    for name, module in model.named_modules():
        sizes = (counting.weight_bytes(module), counting.held_bytes(module), counting.peak_bytes(module))
        if any(sizes):
            depth = "  " * (name.count(".") + 1) if name else ""
            shown = f"{depth}{name.rpartition('.')[2] or '(model)'}"
            rows.append((shown, type(module).__name__, *map(bytes_to_string, sizes)))
    return ["  ".join(cells).rstrip() for cells in padded(rows)]


def aggregated(model: nn.Module, module_depth: int, top_modules: int) -> list[str]:
    """Return, for each depth, the module classes with the most parameters, MACs and time."""
    levels = counting.by_class_and_depth(model)
    shown = levels[: len(levels) - 1 or 1] if module_depth == -1 else levels[:module_depth]
    lines = [f"Top {top_modules} modules in terms of params, MACs or fwd latency at different model depths:"]
    columns = (
        ("params     ", params_to_string),
        ("MACs       ", macs_to_string),
        ("fwd latency", duration_to_string),
    )
    for depth, classes in enumerate(shown):
        lines.append(f"depth {depth}:")
        for place, (label, text) in enumerate(columns):
            first = sorted(classes.items(), key=lambda item: -item[1][place])[:top_modules]
            lines.append(f"    {label} - { ({name: text(values[place]) for name, values in first}) }")
    return lines


def detailed(model: nn.Module, totals: FlopsTotals) -> list[str]:
    """Return the module tree with the figures of each module."""
    return [ORDER, "", NOTES, "", *_module_lines(model, "", 0, totals)]


def _module_lines(module: nn.Module, label: str, depth: int, totals: FlopsTotals) -> list[str]:
    indent = "  " * depth
    head = f"{indent}{label}{type(module).__name__}("
    extra = module.extra_repr()
    children = [(name, child) for name, child in module.named_children()]
    figures = _figures(module, totals)
    if not children:
        return [f"{head}{figures} {extra})"]
    lines = [head, f"{indent}  {figures}"]
    lines += [f"{indent}  {line}" for line in extra.splitlines()]
    for name, child in children:
        lines += _module_lines(child, f"({name}): ", depth + 1, totals)
    return [*lines, f"{indent})"]


def _figures(module: nn.Module, totals: FlopsTotals) -> str:
    params, macs = counting.params_of(module), counting.get_module_macs(module)
    seconds = counting.get_module_duration(module)
    return (
        f"{params_to_string(params)}, {_share(params, totals.params)} Params, "
        f"{macs_to_string(macs)}, {_share(macs, totals.forward.macs)} MACs, "
        f"{duration_to_string(seconds)}, {_share(seconds, totals.seconds)} latency, "
        f"{rate(counting.get_module_flops(module), seconds)},"
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0.0:.2%}"


def write(lines: list[str], to: TextIO | None) -> None:
    print("\n".join(lines), file=to)
