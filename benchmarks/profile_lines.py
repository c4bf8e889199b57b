"""Two printed profiles, read line by line: which lines they share, and in which of their numbers they differ.

A line is known by what it is about: the label of the summary, the depth and column of the aggregated profile, the path
of a module in the detailed one. What counts are the numbers that do not depend on time: parameters, MACs, flops, and
their shares. Forms differ on purpose (ours are those of the documents): `=` or `,` before a share, `100%` or `100.00%`,
`K` or `k`, a unit behind a number whose label names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Numbers = tuple[str, ...]

_SUMMARY = re.compile(r"^(?P<label>[a-zA-Z+/][^:'{]*):\s+(?P<value>\d\S*(?: [a-zA-Z]+)?)\s*$")
_TIMED = re.compile(r"latency|FLOPS|samples/second")
_TOP = re.compile(r"^\s+(?P<column>params|MACs)\s+- (?P<rows>\{.*\})$")
_MODULE = re.compile(r"^(?P<indent> *)(?:\((?P<name>[^()]*)\): )?(?P<kind>[A-Za-z_]\w*)\((?P<rest>.*)$")
_FIGURES = re.compile(
    r"(?P<params>\d[\d.]*(?: [kKMBGT])?)(?: =|,) (?P<share>[\d.]+)% Params, "
    r"(?P<macs>[\d.]+ [kKMGT]?)MACs(?: =|,) (?P<of_macs>[\d.]+)% MACs"
)


@dataclass(frozen=True)
class Comparison:
    lines: int
    """Shared by both profiles."""
    different: dict[str, tuple[Numbers, Numbers]]
    only_ours: list[str]
    only_theirs: list[str]

    @property
    def equal(self) -> int:
        return self.lines - len(self.different)


def compare(ours: str, theirs: str) -> Comparison:
    a, b = numbers_of(ours), numbers_of(theirs)
    shared = [line for line in a if line in b]
    return Comparison(
        len(shared),
        {line: (a[line], b[line]) for line in shared if a[line] != b[line]},
        [line for line in a if line not in b],
        [line for line in b if line not in a],
    )


def numbers_of(profile: str) -> Mapping[str, Numbers]:
    """What a line is about -> its numbers, in one form."""
    found = dict(_summary(profile.split("Aggregated Profile")[0]))
    found |= _aggregated(profile)
    return found | dict(_modules(profile.partition("Detailed Profile")[2]))


def _summary(text: str) -> Iterator[tuple[str, Numbers]]:
    for line in text.splitlines():
        match = _SUMMARY.match(line)
        if match and not _TIMED.search(match["label"]):
            yield match["label"].lower().strip(), (_plain(match["value"]),)


def _aggregated(text: str) -> dict[str, Numbers]:
    found, depth = {}, ""
    for line in text.splitlines():
        if line.startswith("depth "):
            depth = line.rstrip(":")
        elif match := _TOP.match(line):
            rows = re.findall(r"'(\w+)': '([^']*)'", match["rows"])
            found[f"{depth}: {match['column']}"] = tuple(f"{name} {_plain(value)}" for name, value in rows)
    return found


def _modules(text: str) -> Iterator[tuple[str, Numbers]]:
    """A module without children has its figures on its own line, any other on the next one."""
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        module = _MODULE.match(line)
        figures = _FIGURES.search(line)
        if module and (module["name"] or not path):
            indent = len(module["indent"])
            path = [step for step in path if step[0] < indent] + [(indent, module["name"] or module["kind"])]
        if figures and path:
            shares = (f"{float(figures[name]):.2f}%" for name in ("share", "of_macs"))
            name = ".".join(step for _, step in path)
            yield name, (_plain(figures["params"]), _plain(figures["macs"]), *shares)


def _plain(number: str) -> str:
    """``"524.29 KMACs"`` as ``"524.29 k"``."""
    return number.removesuffix("MACs").replace("K", "k").strip()
