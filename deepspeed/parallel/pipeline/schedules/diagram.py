"""SVG timelines of pipeline orders."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from deepspeed.parallel.pipeline.schedules.orders import Action, ActionKind, Simulation

COLOURS = {ActionKind.FORWARD: "#d7e8f4", ActionKind.BACKWARD: "#fbe3d3", ActionKind.WEIGHTS: "#e0eeda"}
INK, BORDER, WAIT = "#1d2b36", "#7d8b96", "#f4f6f8"
LEFT, ROW, GAP, TITLE = 76, 26, 16, 22
LEGIBLE = 13
"""Minimum width of a box with text, in pixels."""


def picture(simulations: Sequence[Simulation], width: int = 960) -> str:
    """Draw timelines one below the other as SVG, on a common time scale: a row per stage, a box per action, labelled
    with its micro-batch; grey is idle time. Boxes of later chunks have a thick border."""
    scale = (width - LEFT - GAP) / max(each.makespan for each in simulations)
    parts: list[str] = []
    top = GAP
    for each in simulations:
        parts += _order(each, top, scale)
        top += TITLE + ROW * each.order.stages + GAP
    parts += _legend(top)
    height = top + ROW
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
            f"<title>{escape(', '.join(each.order.name for each in simulations))}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _order(run: Simulation, top: float, scale: float) -> list[str]:
    order = run.order
    chunks = f", {order.chunks} chunks per stage" if order.chunks > 1 else ""
    title = f"{order.name}{chunks}: {run.bubble:.1%} of the time is waiting, {run.makespan:g} units in all"
    parts = [_text(LEFT, top + 12, title, anchor="start")]
    top += TITLE
    for stage, (actions, times) in enumerate(zip(order.actions, run.times, strict=True)):
        y = top + stage * ROW
        parts.append(_text(LEFT - 8, y + ROW / 2, f"stage {stage}", anchor="end"))
        parts.append(_box(LEFT, y, run.makespan * scale, WAIT))
        for action, (start, end) in zip(actions, times, strict=True):
            parts += _action(action, LEFT + start * scale, y, (end - start) * scale)
    return parts


def _action(action: Action, x: float, y: float, width: float) -> list[str]:
    box = _box(x, y, width, COLOURS[action.kind], thick=action.chunk > 0)
    if width < LEGIBLE:
        return [box]
    return [box, _text(x + width / 2, y + ROW / 2, str(action.micro_batch))]


def _legend(top: float) -> list[str]:
    parts, x = [], float(LEFT)
    names = {
        ActionKind.FORWARD: "forward",
        ActionKind.BACKWARD: "backward",
        ActionKind.WEIGHTS: "deferred weight gradients",
    }
    for kind, name in names.items():
        parts += [_box(x, top, 24, COLOURS[kind]), _text(x + 32, top + ROW / 2, name, anchor="start")]
        x += 60 + 7 * len(name)
    return parts


def _box(x: float, y: float, width: float, colour: str, *, thick: bool = False) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y + 2:.1f}" width="{width:.1f}" height="{ROW - 4}" fill="{colour}" '
        f'stroke="{BORDER}" stroke-width="{1.6 if thick else 0.6}"/>'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y + 4:.1f}" font-size="12" fill="{INK}" text-anchor="{anchor}">{escape(text)}</text>'
