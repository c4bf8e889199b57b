"""Count the shape of the package from its source, and write the table of docs/architecture.md.

    python tools/house.py            # writes the table between its markers
    python tools/house.py --check    # exit code 1 if a limit is passed, or the table shows other rooms

Lines of code change with every commit: the table shows them in hundreds, as they were when it was written. What costs
a process to count is held by the tests that the table names.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- tools/house.py writes this table -->", "<!-- end of the table -->"
NOUN = re.compile(r"(What|Which|Where|How|Who|Whose|Whether|That|Of)\b")
DEFINITION = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
BY_TESTS = (
    ("imports upward, cycles of modules, modules in one folder", "tests/test_architecture.py"),
    ("modules and lines that `initialize` loads", "tests/engine/test_lean_start.py"),
    ("calls of a save", "tests/checkpoint/test_save_cost.py"),
    ("calls of a step", "tests/engine/test_step_cost.py"),
)


class Source:
    """A module of the package."""

    def __init__(self, path: Path) -> None:
        self.room = path.relative_to(ROOT / "deepspeed").parts[0]
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)

    def docstrings(self) -> Iterator[ast.Expr]:
        """Yield the statements that are docstrings."""
        for node in ast.walk(self.tree):
            if (
                isinstance(node, (ast.Module, *DEFINITION))
                and ast.get_docstring(node, clean=False) is not None
            ):
                first = node.body[0]
                assert isinstance(first, ast.Expr)
                yield first

    def lines(self) -> int:
        """Count the lines that are neither blank, nor a comment, nor of a docstring."""
        numbered = enumerate(self.text.splitlines(), 1)
        code = {number for number, line in numbered if line.strip() and not line.lstrip().startswith("#")}
        for docstring in self.docstrings():
            code -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
        return len(code)


def counts() -> list[tuple[str, int, int, bool]]:
    """Return what is counted, how many there are, the limit, and whether the table is to show exactly that."""
    sources = [Source(path) for path in sorted((ROOT / "deepspeed").rglob("*.py"))]
    lines: Counter[str] = Counter()
    for source in sources:
        lines[source.room] += source.lines()
    rooms = [name for name in lines if not name.endswith(".py")]
    nodes = [node for source in sources for node in ast.walk(source.tree)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    engine = Source(ROOT / "deepspeed/engine/engine.py").lines()
    texts = [ast.literal_eval(each.value) for source in sources for each in source.docstrings()]
    total = sum(lines.values())
    return [
        ("rooms", len(rooms), 17, True),
        ("largest room, % of the code", round(100 * max(lines[name] for name in rooms) / total), 20, False),
        ("lines of code", total, 95_300, False),
        ("of them in `compat`", lines["compat"], 5_000, False),
        ("lines of `engine/engine.py`", engine, 400, False),
        ("class names used more than once", sum(count > 1 for count in classes.values()), 13, False),
        (
            "docstrings that begin with What, Which, ...",
            sum(bool(NOUN.match(t.strip())) for t in texts),
            0,
            False,
        ),
    ]


def table() -> str:
    rows = ["| counted | now | at most |", "|---|---:|---:|"]
    for name, count, limit, _ in counts():
        shown = f"{round(count, -2):,}" if limit > 1000 else str(count)
        rows.append(f"| {name} | {shown} | {limit:,} |")
    rows += [f"| {name} | | `{test}` |" for name, test in BY_TESTS]
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Count the shape of the package.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args(argv)
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    if not arguments.check:
        PAGE.write_text(f"{head}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
    failed = False
    for name, count, limit, exact in counts():
        stale = arguments.check and exact and f"| {name} | {count} |" not in rest
        failed |= stale or count > limit
        print(
            f"{'over' if count > limit else 'ok  '} {name}: {count} (at most {limit}){' (stale table)' * stale}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
