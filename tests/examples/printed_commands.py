"""Finds the commands that documents and docstrings print, and parses each with the parser of its own program.

A line of a code block that begins with the name of a program is a command, and must parse with exactly the words that
it prints. The same in backticks, in the middle of a sentence, is a mention: its tool and its options must exist.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import inspect
import io
import itertools
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from deepspeed.compat.finder import our_path
from deepspeed.tools import ds
from deepspeed.tools.launcher import runner
from tests.examples.parsing import Wrong, after_parsing, refuse
from tests.tools.launcher.programs import REPOSITORY

PROGRAM = r"(?:\S*/bin/)?(?:python3?|deepspeed|dsr?|ds_\w+|torchrun|make|pip|pytest|accelerate)"
COMMAND = re.compile(rf"(?:\$ )?(?:[A-Z_]+=\S+ +)*({PROGRAM}(?: +\S.*)?)$")
MENTION = re.compile(rf"(?<!`)`({PROGRAM} [^`\n]+)`(?!`)")
UNINDENTED = re.compile(
    r"python3? (?:-m \S+|\S+\.py)( |$)"
)  # at the margin of a docstring, where prose stands, too
ANY = re.compile(rf"^(?:\"{{3}})? *(?:\$ )?(?:[A-Z_]+=\S+ +)*{PROGRAM} +[^\s=]|`{PROGRAM} ", flags=re.M)
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", flags=re.S | re.M)
OF_A_SHELL = ("", "sh", "bash", "console", "text")
# Text after a command: a comment, or its explanation in a separate column.
REMARK = re.compile(r"\s+#\s.*|\s{3,}[^-\s].*")
# Files and folders of the reader, and what a command writes. Anything else that looks like a path has to exist.
READERS_SCRIPTS = (
    "train.py",
    "before.py",
    "after.py",
    "write.py",
    "curves.py",
    "script.py",
    "my_script.py",
    "checkpoints/zero_to_fp32.py",
)
READERS = re.compile(
    r"(ds|config|ds_config|accelerate|all|here|file|serve)\.(json|yaml)|speed\.png|\S*[A-Z]{2,}\S*|\.\./.*"
    r"|\./(Llama-3\.1-8B|my-model)|(out|ckpt|checkpoints|exported|audit|dist|gpt2)/.*|/(local_nvme|some/disk)"
)
PATH = re.compile(r"\S*/\S*|\S+\.(py|json|jsonl|yaml|toml|txt|png|md)")
NUMBERS = {"PID": "1", "N": "1"}  # words in capitals where a parser wants a number
SLOW = {"--choices", "--calibrate", "--calibration"}  # options of `ds plan`
# Programs that parse their own arguments: all that may be printed after them, besides words in capitals.
WITHOUT_PARSER = {"tests.tools.launcher.real_machines": ["install"]}


@dataclass(frozen=True)
class Command:
    source: Path  # the document or module, in the repository
    line: int
    text: str
    mention: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.text}"


# ---- finding them -----------------------------------------------------------------------------------------


def documents() -> list[Path]:
    """All that prints commands, as paths in the repository."""
    patterns = ("*.md", "docs/*.md", "docs/recipes/*.md", "examples/**/*.md", "examples/**/*.py")
    patterns += ("benchmarks/**/*.md", "benchmarks/**/*.py", "deepspeed/**/*.py", "tools/*.py")
    found = [path for pattern in patterns for path in sorted(REPOSITORY.glob(pattern))]
    return [path.relative_to(REPOSITORY) for path in found]


def collect(document: Path) -> list[Command]:
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    if document.suffix == ".md":
        return list(_commands_of(document, 1, text, margin=4))
    if not ANY.search(text):
        return []
    constants = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    return [
        command
        for node in constants
        if isinstance(node.value, str) and re.search(r"[\n`]", node.value)
        for command in _commands_of(document, node.lineno, inspect.cleandoc(node.value), margin=2)
    ]


def _commands_of(document: Path, first: int, text: str, margin: int) -> Iterator[Command]:
    """``margin``: columns by which a code block is indented at least."""
    fenced: dict[int, bool] = {}
    for block in FENCE.finditer(text):
        begin = text.count("\n", 0, block.start())
        of_a_shell = block[1] in OF_A_SHELL
        fenced |= dict.fromkeys(range(begin, begin + block[0].count("\n") + 1), of_a_shell)
    lines = text.splitlines()
    for number, line in enumerate(lines):
        inside = fenced.get(number, len(line) - len(line.lstrip()) >= margin or _at_margin(line, margin))
        if not inside:
            for mention in MENTION.findall(line):
                yield Command(document, first + number, mention, mention=True)
            continue
        after = number
        while line.endswith("\\"):
            after += 1
            line = line[:-1].rstrip() + " " + lines[after].lstrip()
        if found := COMMAND.match(line.strip()):
            yield Command(document, first + number, REMARK.sub("", found[1]))


def _at_margin(line: str, margin: int) -> bool:
    return margin == 2 and UNINDENTED.match(line) is not None


# ---- checking them ----------------------------------------------------------------------------------------


def check(command: Command) -> None:
    """Raises Wrong with the reason why the command does not do what it promises."""
    text = re.sub(r"\[([^\]]*)\](?=\s|$)", r"\1", command.text)  # options in brackets are options
    words = [NUMBERS.get(word, word) for word in shlex.split(text) if word != "..."]
    for _, of_one in itertools.groupby(words, key=lambda word: word == "|"):
        program, *rest = of_one
        if re.fullmatch(PROGRAM, program):  # others are the shell's
            with mock.patch.object(argparse.ArgumentParser, "error", refuse):
                Checker(command)(program.rpartition("/bin/")[2], rest)


class Checker:
    """Find the parser of one command's program, and of the script that it starts."""

    def __init__(self, command: Command) -> None:
        self.command = command

    def __call__(self, program: str, words: Sequence[str]) -> None:
        if program in ("python", "python3"):
            self.python(words)
        elif program == "torchrun":
            self.torchrun(words)
        elif program == "deepspeed" or (program == "ds" and (not words or words[0] not in ds.TOOLS)):
            self.deepspeed(words, program)
        elif program in ("ds", "dsr") or program.startswith("ds_"):
            self.known(program, re.findall(r"^(\w+) = ", _section("project.scripts"), flags=re.M))
            name, *rest = words if program == "ds" else [{"dsr": "report"}.get(program, program[3:]), *words]
            self.tool(name, rest)
        elif program == "make":
            self.make(words)
        elif program == "pip":
            self.pip(words)
        elif program == "pytest":
            self.pytest(words)
        elif program == "accelerate":
            self.known(words[0], ("launch", "config"))  # theirs
        else:
            raise Wrong("no known program")

    def parse(self, function: Callable[[], object], words: Sequence[str]) -> list[str]:
        """Return the ``words`` that the parser called by ``function`` leaves over."""
        return after_parsing(function, words, only_options=self.command.mention)

    def known(self, word: str, words: Sequence[str]) -> None:
        if word not in words:
            raise Wrong(f"{word!r} is none of {', '.join(words)}")

    def paths(self, words: Sequence[str]) -> None:
        for word in words:
            value = word.partition("=")[2] if word.startswith("-") else word
            readers = READERS.fullmatch(value) or value in READERS_SCRIPTS
            if PATH.fullmatch(value) and not readers and self.file(value) is None:
                raise Wrong(f"there is no {value}")

    def file(self, name: str) -> Path | None:
        """In the repository; commands of an example may be printed for its own folder."""
        folder = (REPOSITORY / self.command.source).parent
        return next((path for path in (folder / name, REPOSITORY / name) if path.exists()), None)

    def python(self, words: Sequence[str]) -> None:
        first, *rest = words
        if first == "-c":
            compile(rest[0], "-c", "exec")
        elif first == "-m":
            self.module(rest[0], rest[1:])
        elif first == "-X":
            self.known(rest[0], ("faulthandler",))
        else:
            self.script(first, rest)

    def script(self, name: str, words: Sequence[str]) -> None:
        path = self.file(name)
        if path is None or path.suffix != ".py":
            return self.known(name, READERS_SCRIPTS)
        if "--" in words:  # before another command
            of_ours = words.index("--")
            self(words[of_ours + 1], words[of_ours + 2 :])
            self.paths(words[:of_ours])
        else:
            self.paths(words)
        if not _has_parser(path):
            return self.without_parser(name, words)
        where = [str(path.parent), *sys.path]

        def run() -> None:
            sys.path[:] = where
            runpy.run_path(str(path), run_name="__main__")

        if left := self.parse(run, words):
            raise Wrong(f"{name} does not know {left}")

    def module(self, name: str, words: Sequence[str]) -> None:
        if name == "package.train":  # the reader's
            return
        try:
            spec = importlib.util.find_spec(our_path(name) or name)
        except ModuleNotFoundError as error:
            raise Wrong(f"there is no module {name}") from error
        if spec is None or spec.origin is None:
            raise Wrong(f"there is no module {name}")
        path = Path(spec.origin)
        if path.name == "__init__.py":
            path = path.with_name("__main__.py")
        self.paths(words)
        if not _has_parser(path) and name != "venv":
            return self.without_parser(name, words)
        if name == "deepspeed.tools.launcher.launcher_helper":
            words = [*words[:3], "left to the script"]
        self.parse(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True), words)

    def without_parser(self, name: str, words: Sequence[str]) -> None:
        for word in words:
            if not re.fullmatch(r"[A-Z_:]+|\d+", word):
                self.known(word, WITHOUT_PARSER.get(name, []))

    def torchrun(self, words: Sequence[str]) -> None:
        from torch.distributed import run

        parsed = run.parse_args(list(words))
        self.script(parsed.training_script, parsed.training_script_args)

    def deepspeed(self, words: Sequence[str], program: str) -> None:
        if not words:  # the name of the process, in a diagram
            return
        if self.command.mention:
            if not words[0].startswith("-") and not words[0].endswith(".py"):
                raise Wrong(f"{program} has no tool {words[0]}")
            self.parse(lambda: runner.main(), words)
            return
        found = runner.parse_args(words)
        if found.hostfile not in (runner.DLTS_HOSTFILE, "hosts"):
            raise Wrong(f"{found.hostfile} is no file that a page tells how to write")
        if found.module:
            self.module(found.user_script, found.user_args)
        elif found.user_script in ("accelerate", "torchrun", "python"):
            self(found.user_script, found.user_args)
        else:
            self.script(found.user_script, found.user_args)

    def tool(self, name: str, words: Sequence[str]) -> None:
        self.known(name, tuple(ds.TOOLS))
        self.paths(words)
        tool = ds.TOOLS[name]
        function = getattr(importlib.import_module(f"deepspeed.tools.{tool.module}"), tool.function)
        left = self.parse(lambda: function(None), words)
        if name == "bench" and not self.command.mention:
            runner.parse_args([*left, "script.py"])  # the rest is the launcher's
        elif left:
            raise Wrong(f"ds {name} does not know {left}")

    def make(self, words: Sequence[str]) -> None:
        text = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
        targets = re.findall(r"^([a-z][a-z-]*):", text, flags=re.M)
        variables = re.findall(r"^(\w+) *[?:]?=", text, flags=re.M)
        for word in words:
            name, given, _ = word.partition("=")
            self.known(name, variables if given else targets)

    def pip(self, words: Sequence[str]) -> None:
        from pip._internal.commands import commands_dict, create_command

        self.known(words[0], tuple(commands_dict))
        _, requirements = create_command(words[0]).parse_args(list(words[1:]))
        extras = re.findall(r"^(\w+) = \[", _section("project.optional-dependencies"), flags=re.M)
        for word in requirements:
            name, bracket, names = word.rstrip("]").partition("[")
            if bracket and re.match(r"\.$|deepspeed|.*dist/", name):
                for extra in names.split(","):
                    self.known(extra, extras)

    def pytest(self, words: Sequence[str]) -> None:
        self.paths(words)
        for option, value in zip(words, words[1:], strict=False):
            if option == "-m":
                self.known(value, re.findall(r'^ +"(\w+):', _section("tool.pytest.ini_options"), flags=re.M))


def _section(name: str) -> str:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    return text.split(f"[{name}]\n")[1].split("\n[")[0]


def _has_parser(path: Path) -> bool:
    """Also a module in the same folder, which it imports."""
    text = path.read_text(encoding="utf-8")
    beside = [
        path.with_name(f"{name}.py") for name in re.findall(r"^(?:from|import) (\w+)", text, flags=re.M)
    ]
    texts = [text, *(other.read_text(encoding="utf-8") for other in beside if other.exists())]
    return any(re.search(r"\.parse_(known_)?args\(", each) for each in texts)


# ---- running the quick ones -------------------------------------------------------------------------------


def is_quick(command: Command) -> bool:
    """Checks and plans, except those that measure or compare for seconds, or need a measurement or a library."""
    program, *words = shlex.split(command.text)
    # Recipes plan with their own configs: tests/examples/test_recipes.py runs those.
    if command.mention or program not in ("ds", "ds_check") or command.source.parent.name == "recipes":
        return False
    if program == "ds_check" or words[:1] == ["check"]:
        return True
    if words[:1] == ["init"]:
        return "gpt:" in command.text
    return words[:1] == ["plan"] and not SLOW & set(words) and not re.search(r"--model \.", command.text)


def run(command: Command) -> None:
    """In the reader's folder. Raises Wrong, with what it says, if it fails."""
    program, *words = shlex.split(command.text)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = ds.main(words if program == "ds" else [program.removeprefix("ds_"), *words])
    if code != 0:
        raise Wrong(f"exit code {code}: {said.getvalue()}")


def report(texts: Sequence[str] = ()) -> None:
    """Prints a JSON object: the number of commands, and what is wrong with which. With ``texts``, of these instead,
    as if a page of `docs` had printed them."""
    commands = [Command(Path("docs/page.md"), 1, text) for text in texts]
    commands = commands or [command for document in documents() for command in collect(document)]
    wrong: dict[str, str] = {}
    done: set[str] = set()  # `ds init` overwrites nothing
    for command in commands:
        try:
            check(command)
            if is_quick(command) and command.text not in done:
                done.add(command.text)
                run(command)
        except (Exception, SystemExit, Wrong) as error:
            wrong[str(command)] = f"{type(error).__name__}: {error}"
    print(json.dumps({"commands": len(commands), "wrong": wrong}))
