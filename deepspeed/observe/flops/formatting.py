"""Numbers as the profile writes them: rounded, with a prefix of their unit."""

from __future__ import annotations

DEFAULT_PRECISION = 2

_LARGE = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3))
_SMALL = (("m", 1e-3), ("u", 1e-6))
_PREFIXES = {"": 1.0, "k": 1e3, "B": 1e9, "n": 1e-9, **dict(_LARGE), **dict(_SMALL)}


def number_to_string(num: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """``1234`` as ``"1.23 K"`` and ``7e9`` as ``"7 G"``; ``units`` fixes the prefix: T, G, M, K, m, u, or none
    (``""``)."""
    prefix = _prefix_for(num) if units is None else units
    if prefix not in _PREFIXES:
        raise ValueError(f"units={units!r}: the prefixes are {', '.join(map(repr, _PREFIXES))}")
    scaled = num if _PREFIXES[prefix] == 1.0 else num / _PREFIXES[prefix]
    rounded = round(scaled, precision)
    return f"{int(rounded) if float(rounded).is_integer() else rounded} {prefix}"


def _prefix_for(num: float) -> str:
    size = abs(num)
    if size >= 1 or size == 0:
        return next((prefix for prefix, value in _LARGE if size >= value), "")
    return next((prefix for prefix, value in _SMALL if size >= value), _SMALL[-1][0])


def flops_to_string(flops: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Floating-point operations per second: ``"81.9 TFLOPS"``."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """``"3139.93 GMACs"``."""
    return f"{number_to_string(macs, units, precision)}MACs"


def bytes_to_string(b: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """``"1.5 MB"``, of 10^6 bytes."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """``"336.23 M"``; billions are ``B``."""
    text = number_to_string(params_num, units.replace("B", "G") if units else units, precision)
    return text.replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Seconds: ``"76.67 ms"``; ``units``: s, ms or us."""
    prefix = units
    if units is not None:
        prefix = units.removesuffix("s")
    elif abs(duration) >= 1:
        prefix = ""  # thousands of seconds stay seconds
    return f"{number_to_string(duration, prefix, precision)}s"
