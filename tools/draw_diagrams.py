"""Draws the diagrams of the documentation, `docs/images/*.svg`; with `--check` it only compares.

SVG, because GitHub, the site and any browser draw it without a script, and text in it can be read and searched.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"

INK, SOFT, LINE = "#1d2b36", "#52606b", "#7d8b96"
COLOURS = {  # fill and border
    "plain": ("#f4f6f8", "#aab4bd"),
    "weights": ("#d7e8f4", "#2f7fb5"),
    "gradients": ("#fbe3d3", "#c8663a"),
    "state": ("#e0eeda", "#5a9146"),
    "file": ("#f5ecd0", "#b3903a"),
}


@dataclass
class Drawing:
    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, lines: str, *, size: int = 14, colour: str = INK, bold: bool = False,
        anchor: str = "middle",
    ) -> None:  # fmt: skip
        """``lines`` around the height ``y``."""
        split = lines.split("\n")
        top = y - (len(split) - 1) * size * 0.65 + size * 0.35
        weight = ' font-weight="bold"' if bold else ""
        for number, line in enumerate(split):
            self.parts.append(
                f'<text x="{x:g}" y="{top + number * size * 1.3:.1f}" font-size="{size}" fill="{colour}" '
                f'text-anchor="{anchor}"{weight}>{escape(line)}</text>'
            )

    def box(
        self, x: float, y: float, w: float, h: float, text: str = "", kind: str = "plain", *, size: int = 14,
        dashed: bool = False,
    ) -> None:  # fmt: skip
        fill, border = COLOURS[kind]
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        fill = "none" if dashed else fill
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="5" fill="{fill}" stroke="{border}" '
            f'stroke-width="1.5"{dash}/>'
        )
        if text:
            self.text(x + w / 2, y + h / 2, text, size=size)

    def arrow(self, *points: tuple[float, float], colour: str = LINE) -> None:
        """A line through the points, along the axes, with a tip that is drawn: not all viewers know markers."""
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        back = (x - 9 * dx, y - 9 * dy)
        path = " L ".join(f"{px:g} {py:g}" for px, py in (*points[:-1], back))
        sides = [(back[0] + side * 4.5 * dy, back[1] + side * 4.5 * dx) for side in (1, -1)]
        tip = " L ".join(f"{px:g} {py:g}" for px, py in ((x, y), *sides))
        self.parts += [
            f'<path d="M {path}" fill="none" stroke="{colour}" stroke-width="1.8"/>',
            f'<path d="M {tip} z" fill="{colour}"/>',
        ]

    def svg(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" '
                'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
                f"<title>{escape(self.title)}</title>",
                f'<rect width="{self.width}" height="{self.height}" rx="8" fill="#ffffff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def one_step() -> Drawing:
    """Stage 2 on two ranks, from a batch to updated weights."""
    d = Drawing(960, 440, "One training step at ZeRO stage 2 on two ranks")
    columns = (
        (40, 120, "batch"), (190, 130, "forward"), (350, 150, "backward"), (530, 130, "reduce-scatter"),
        (690, 110, "step"), (830, 100, "all-gather"),
    )  # fmt: skip
    for x, w, name in columns:
        d.text(x + w / 2, 34, name, size=15, bold=True)
    for rank, y in ((0, 80), (1, 250)):
        middle = y + 60
        d.text(14, middle, f"{rank}", size=15, bold=True)
        d.box(40, y + 25, 120, 70, "its share of\nthe batch")
        d.box(190, y + 25, 130, 70, "whole weights\n(16-bit or fp32)", "weights")
        d.box(350, y + 25, 150, 70, "gradients of its share,\nbucket by bucket", "gradients", size=13)
        d.box(530, y + 25, 130, 70, f"sum over ranks,\nslice {rank} only", "gradients")
        d.box(
            690, y + 15, 110, 90, f"slice {rank} of\nmaster weights,\nmoments and\nweights", "state", size=13
        )
        d.box(830, y + 25, 100, 70, "whole\nweights", "weights")
        for start, end in ((160, 190), (320, 350), (660, 690), (800, 830)):
            d.arrow((start, middle), (end, middle))
        d.arrow((500, middle), (530, middle))
    for x in (595, 880):
        d.arrow((x, 175), (x, 275))
        d.arrow((x + 16, 275), (x + 16, 175))
    d.text(14, 58, "rank", size=12, colour=SOFT, anchor="start")
    d.text(
        480, 400,
        "Reduction overlaps with backward: a bucket is sent as soon as all of its gradients are complete.\n"
        "The gradient norm is one small all-reduce before the update, so that all ranks clip by the same norm.",
        size=13, colour=SOFT,
    )  # fmt: skip
    return d


def life_of_a_parameter() -> Drawing:
    """Stage 3: the states of a bucket of parameters, and what moves it from one to the next."""
    d = Drawing(960, 430, "The life of a parameter at ZeRO stage 3")
    d.text(480, 30, "One bucket (the parameters of a block) on two ranks", size=15, bold=True)
    stations = (
        (20, "built", "whole, or sharded\nunder zero.Init"),
        (266, "sharded", "each rank holds its slice;\nparam.data is empty"),
        (512, "gathered", "whole on every rank,\nparam.data has its shape"),
        (758, "updated", "each rank updates its\nslice of the weights"),
    )
    for x, name, said in stations:
        d.text(x + 91, 72, name, size=15, bold=True)
        d.text(x + 91, 240, said, size=13, colour=SOFT)
        d.box(x, 90, 182, 120)
    for rank, y in ((0, 100), (1, 155)):
        d.box(32, y, 158, 44, "", "weights")
        for x, kind in ((278, "weights"), (770, "state")):
            d.box(x + 79 * rank, y, 79, 44, f"slice {rank}", kind, size=13)
            d.box(x + 79 * (1 - rank), y, 79, 44, "", kind, dashed=True)
        for part in range(2):
            d.box(524 + 79 * part, y, 79, 44, f"slice {part}", "weights", size=13)
    for start, height, end, said in (
        (202, 150, 266, "initialize"), (448, 125, 512, "gather"), (512, 180, 448, "release"), (694, 150, 758, "step"),
    ):  # fmt: skip
        d.arrow((start, height), (end, height))
        d.text((start + end) / 2, height - 12, said, size=12, colour=SOFT)
    d.arrow((849, 275), (849, 310), (357, 310), (357, 275))
    d.text(603, 297, "the next forward gathers the new weights", size=13, colour=SOFT)
    d.text(
        480, 365,
        "Gathered before the first module that uses it in forward, and again in backward unless it was kept:\n"
        "a bucket is released only when another one needs the memory. Its gradient is reduce-scattered\n"
        "as at stage 2, so that each rank keeps the gradient of its own slice.",
        size=13, colour=SOFT,
    )  # fmt: skip
    return d


def resharding() -> Drawing:
    """A checkpoint of two ranks, loaded by three: intervals of each parameter are intersected."""
    d = Drawing(960, 430, "A checkpoint of two ranks, loaded by three")
    left, width = 190, 720
    weight, bias = width * 0.75, width * 0.25
    d.text(20, 60, "parameters", size=14, bold=True, anchor="start")
    d.box(left, 40, weight, 40, "weight [6, 4]: elements 0 to 24", "plain")
    d.box(left + weight, 40, bias, 40, "bias [8]: 0 to 8", "plain")
    d.text(20, 150, "saved by two ranks\nat stage 2", size=14, bold=True, anchor="start")
    for rank, said in enumerate(
        ("rank 0's file: weight 0 to 16", "rank 1's file: weight 16 to 24, bias 0 to 8")
    ):
        d.box(left + rank * width / 2, 130, width / 2, 40, said, "file")
    d.text(20, 290, "loaded by three\nat stage 3", size=14, bold=True, anchor="start")
    needs = ((0, 12, "rank 0: weight 0 to 12"), (12, 24, "rank 1: weight 12 to 24"), (24, 32, "rank 2: bias"))
    unit = width / 32
    for low, high, text in needs:
        d.box(left + low * unit, 270, (high - low) * unit, 40, text, "weights")
    for low, high in ((0, 12), (12, 16), (16, 24), (24, 32)):
        x = left + (low + high) / 2 * unit
        d.arrow((x, 170), (x, 270))
    for x, text in ((6, "0 to 12"), (14, "12 to 16"), (20, "16 to 24"), (28, "0 to 8")):
        d.text(left + x * unit + 6, 220, text, size=12, colour=SOFT, anchor="start")
    d.text(
        480, 385,
        "Each file says which interval of which parameter it holds, independent of the number of ranks.\n"
        "A rank that loads takes the intervals that it needs from whichever files have them, and reads nothing else.\n"
        "The same holds for master weights and for every kind of optimizer state.",
        size=13, colour=SOFT,
    )  # fmt: skip
    return d


def choosing() -> Drawing:
    """Questions down the left; the answer "no" leads to the right, "yes" further down."""
    d = Drawing(960, 640, "Which stage, which offload, which parallelism")
    questions = (
        (
            "One sample's activations\nfit with checkpointing?",
            "sequence parallelism,\ntiled loss and MLP",
            "weights",
        ),
        ("16 bytes per parameter\nfit on each device?", "", "plain"),
        ("2 + 14 / N bytes?\n(2 + 2 + 12 / N at stage 1)", "", "plain"),
        ("16 / N bytes?", "", "plain"),
        ("2 / N bytes?\n(weights alone)", "", "plain"),
    )
    answers = (
        None,
        ("stage 0", "nothing is divided; gradients are sent once", "state"),
        ("stage 1 or 2", "the same bytes are sent", "state"),
        ("stage 3", "half as much again is sent", "state"),
        ("stage 3, optimizer on the host", "the host updates: accumulate more", "gradients"),
    )
    x, w, h = 30, 270, 64
    for number, (question, aside, kind) in enumerate(questions):
        y = 56 + 100 * number
        d.box(x, y, w, h, question, size=14)
        answer = answers[number]
        if answer is None:
            d.arrow((x + w, y + h / 2), (390, y + h / 2))
            d.text(345, y + h / 2 - 12, "no", size=12, colour=SOFT)
            d.box(390, y, 250, h, aside, kind)
            d.text(665, y + h / 2, "then go on below", size=13, colour=SOFT, anchor="start")
        else:
            d.arrow((x + w, y + h / 2), (390, y + h / 2))
            d.text(345, y + h / 2 - 12, "yes", size=12, colour=SOFT)
            d.box(390, y, 250, h, answer[0], answer[2])
            d.text(665, y + h / 2, answer[1], size=13, colour=SOFT, anchor="start")
        d.arrow((x + w / 2, y + h), (x + w / 2, y + 100))
        d.text(
            x + w / 2 + 10,
            y + h + 18,
            "yes" if answer is None else "no",
            size=12,
            colour=SOFT,
            anchor="start",
        )
    d.box(x, 556, w, h, "stage 3, weights on the host, too,\nor on NVMe", "file", size=14)
    d.text(
        390, 588,
        "N: ranks. Nodes on a slow link: ZeRO++, local steps or a pipeline over nodes;\n"
        "experts: expert parallelism;\nlayers too large to gather: tensor parallelism within a node.",
        size=13, colour=SOFT, anchor="start",
    )  # fmt: skip
    d.text(
        30, 32, "Take the first that fits, in order of what a step costs", size=15, bold=True, anchor="start"
    )
    return d


def house() -> Drawing:
    """The rooms, lowest at the bottom: imports point downward."""
    d = Drawing(960, 560, "The rooms of the package: imports point downward")
    floors = (
        ("names of 0.19", "plain", ("compat",)),
        ("commands", "plain", ("tools",)),
        ("what a user builds", "file", ("inference", "engine")),
        ("the model", "weights", ("transforms", "parallel", "compression", "planning")),
        ("the core", "state", ("checkpoint", "zero")),
        ("around the core", "gradients", ("optim", "data", "observe")),
        ("foundations", "plain", ("base", "ops", "config", "comm")),
    )
    for floor, (name, kind, rooms) in enumerate(floors):
        y = 24 + 72 * floor
        d.text(20, y + 26, name, size=14, bold=True, anchor="start")
        width = (760 - 12 * (len(rooms) - 1)) / len(rooms)
        for number, room in enumerate(rooms):
            d.box(180 + number * (width + 12), y, width, 52, room, kind, size=13)
        if floor + 1 < len(floors):
            d.arrow((560, y + 52), (560, y + 72))
    said = "A module imports only from its own room and those below: on lower floors, or further left on its floor."
    d.text(480, 540, said, size=13, colour=SOFT)
    return d


@dataclass
class Pictured:
    """What the package draws itself."""

    text: str

    def svg(self) -> str:
        return self.text


def pipeline_orders() -> Pictured:
    """1F1B, and both with split backwards, for four stages and eight micro-batches."""
    from deepspeed.parallel.pipeline.schedules import orders
    from deepspeed.parallel.pipeline.schedules.diagram import picture
    from deepspeed.parallel.pipeline.schedules.zero_bubble import zero_bubble

    whole = orders.simulate(orders.one_forward_one_backward(4, 8))
    split = orders.simulate(zero_bubble(4, 8))
    half = orders.Durations(0.5, 0.5, 0.5)  # of a chunk that is half of a stage
    shaped = orders.simulate(zero_bubble(4, 8, 2, zigzag=True, durations=half), half)
    return Pictured(picture([whole, split, shaped]))


DIAGRAMS = {
    "house": house,
    "one_step": one_step,
    "life_of_a_parameter": life_of_a_parameter,
    "resharding": resharding,
    "pipeline_orders": pipeline_orders,
    "choosing": choosing,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="fail if a file differs from what would be written"
    )
    check = parser.parse_args().check
    old = []
    for name, draw in DIAGRAMS.items():
        path, svg = FOLDER / f"{name}.svg", draw().svg()
        if check and (not path.exists() or path.read_text(encoding="utf-8") != svg):
            old.append(path.name)
        elif not check:
            path.write_text(svg, encoding="utf-8")
    if old:
        sys.exit(f"run tools/draw_diagrams.py: {', '.join(old)} differ from it")


if __name__ == "__main__":
    main()
