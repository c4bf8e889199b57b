"""Curves as an SVG file, without a library."""

from __future__ import annotations

from pathlib import Path

COLOURS = ("#2a6f97", "#c1440e", "#5a7d2a", "#7b4b94")
WIDTH, HEIGHT, LEFT, TOP, PLOT_W, PLOT_H = 720, 300, 60, 40, 280, 210


def draw(curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Score and KL of each kind of learning, by batch of answers."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for panel, (name, title) in enumerate((("reward", "mean score"), ("kl", "KL to the reference, nats"))):
        parts.append(_panel(curves, name, title, LEFT + panel * (PLOT_W + 80)))
    for at, kind in enumerate(curves):
        parts.append(f'<text x="{LEFT + 80 * at}" y="20" fill="{COLOURS[at]}">{kind.upper()}</text>')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]))


def _panel(curves: dict[str, list[dict[str, float]]], name: str, title: str, left: int) -> str:
    values = [point[name] for curve in curves.values() for point in curve]
    low, high = min(0.0, *values), max(1.0, *values)
    longest = max(len(curve) for curve in curves.values())
    bottom = TOP + PLOT_H

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * PLOT_H

    parts = [
        f'<rect x="{left}" y="{TOP}" width="{PLOT_W}" height="{PLOT_H}" fill="none" stroke="#999"/>',
        f'<text x="{left}" y="{bottom + 32}">{title}, by batch of answers</text>',
        *(
            f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2g}</text>'
            for value in (low, high)
        ),
        f'<text x="{left + PLOT_W}" y="{bottom + 15}" text-anchor="end">{longest}</text>',
    ]
    for at, curve in enumerate(curves.values()):
        points = " ".join(
            f"{left + place / max(1, longest - 1) * PLOT_W:.1f},{y(point[name]):.1f}"
            for place, point in enumerate(curve)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[at]}" stroke-width="1.6"/>')
    return "\n".join(parts)
