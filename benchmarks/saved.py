"""Numbers of saved results: a cell of a table, or a group of a pattern, for the pages that quote them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def tables(text: str) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """(title, header, rows) of each table in a saved report: the line of dashes under the header tells the columns."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if number < 2 or not re.fullmatch(r"-+(  -+)+", line):
            continue
        spans = [match.span() for match in re.finditer(r"-+", line)]
        rows = []
        for row in lines[number + 1 :]:
            if not row:
                break
            rows.append([row[begin:end].strip() for begin, end in spans])
        yield lines[number - 2], [lines[number - 1][begin:end].strip() for begin, end in spans], rows


@dataclass(frozen=True)
class Cell:
    """A cell of a table in ``results/<report>.txt``: in the first table whose title begins so, the first row that
    begins with these cells. ``column``: how its heading begins; "" for the last one of a table without headings."""

    report: str
    title: str
    row: str | tuple[str, ...]
    column: str

    def text(self) -> str:
        wanted = (self.row,) if isinstance(self.row, str) else self.row
        for title, header, rows in tables(
            (FOLDER / "results" / f"{self.report}.txt").read_text(encoding="utf-8")
        ):
            if not title.startswith(self.title):
                continue
            for row in rows:
                if tuple(row[: len(wanted)]) == wanted:
                    return row[
                        next(n for n, name in enumerate(header) if name.startswith(self.column))
                        if self.column
                        else -1
                    ]
        raise LookupError(f"no such cell: {self}")


@dataclass(frozen=True)
class Found:
    """The first group of a pattern in ``results/<report>.txt``."""

    report: str
    pattern: str

    def text(self) -> str:
        match = re.search(
            self.pattern, (FOLDER / "results" / f"{self.report}.txt").read_text(encoding="utf-8")
        )
        if match is None:
            raise LookupError(f"no such line: {self}")
        return match[1]


@dataclass(frozen=True)
class Ratio:
    """One number over another, with as many digits after the point."""

    over: Cell | Found
    under: Cell | Found
    digits: int = 1

    def text(self) -> str:
        return f"{number(self.over) / number(self.under):.{self.digits}f}"


Source = Cell | Found | Ratio


def number(source: Cell | Found) -> float:
    match = re.match(r"[\d.,]+", source.text())
    if match is None:
        raise ValueError(f"not a number: {source}: {source.text()}")
    return float(match[0].replace(",", ""))


def reports_of(source: Source) -> list[str]:
    if isinstance(source, Ratio):
        return [*reports_of(source.over), *reports_of(source.under)]
    return [source.report]


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script that writes a page from saved results, described by the script's docstring."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if it is not up to date"
    )
    return parser


def write_or_check(page: Path, make: Callable[[str], str], *, check: bool) -> None:
    """Write what ``make`` makes of the page's text, "" if there is none; with ``check`` leave with an error instead, if
    that is another text."""
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    after = make(before)
    if not check:
        page.write_text(after, encoding="utf-8")
    elif after != before:
        sys.exit(f"{page.name}: not the numbers of benchmarks/results; run this script")
