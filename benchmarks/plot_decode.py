"""Draw `oasiskv bench decode --backend cuda --json`: throughput, requests running and TPOT over concurrency, a figure (SVG) a context.

    python benchmarks/plot_decode.py benchmarks/results/decode_h200.jsonl benchmarks/results/vllm_h200.jsonl

Rows of one file or several; those of vLLM (mode `vllm`) are drawn where model and context are measured by us too. Rows of one arm
whose settings differ become a line each, named by what differs; of repeated ones the medians are drawn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PANELS = (("tok_s", "tokens a second"), ("running", "requests running"), ("tpot_ms", "TPOT, ms"))
NAMES = {"dense": "dense", "oasis": "oasis", "vllm": "vLLM, dense"}
SETTINGS = ("dtype", "prefill", "fetch_ratio", "drafter", "sms", "hbm_kv_gib", "host_kv_gib")
# Of Okabe and Ito, told apart by any kind of sight; markers say the same again.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
MARKERS = ("circle", "square", "triangle", "diamond")

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 300, 240, 54, 74, 40, 14  # of a panel's plot, and around it; pixels


@dataclass
class Line:
    name: str
    points: dict[int, Row]  # by concurrency


def read(paths: Sequence[Path]) -> list[Row]:
    """Raises ValueError naming file and line of what is not such a row."""
    rows = []
    for path in paths:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
                missing = [k for k in ("mode", "model", "context", "concurrency", *(k for k, _ in PANELS)) if k not in row]
            except (json.JSONDecodeError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a JSON object: {error}") from None
            if missing:
                raise ValueError(f"{path}:{number}: no {', '.join(missing)}: it is not a row of `oasiskv bench decode --backend cuda`")
            rows.append(row)
    return rows


def figures(rows: list[Row]) -> dict[tuple[str, int], list[Row]]:
    """Rows by (model, context), of those that have more than a reference."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row["model"], row["context"]), []).append(row)
    return {key: some for key, some in sorted(found.items()) if any(r["mode"] != "vllm" for r in some)}


def lines(rows: list[Row]) -> list[Line]:
    """One an arm and its settings, arms in the order of NAMES."""
    result = []
    for mode in sorted({r["mode"] for r in rows}, key=lambda m: [*NAMES, m].index(m)):
        arm = [r for r in rows if r["mode"] == mode]
        differ = [s for s in SETTINGS if len({str(r.get(s)) for r in arm}) > 1]
        for key in sorted({tuple(str(r.get(s)) for s in differ) for r in arm}):
            same = [r for r in arm if tuple(str(r.get(s)) for s in differ) == key]
            name = ", ".join([NAMES.get(mode, mode), *(f"{s} {v}" for s, v in zip(differ, key, strict=True))])
            points = {}
            for concurrency in sorted({r["concurrency"] for r in same}):
                repeated = [r for r in same if r["concurrency"] == concurrency]
                points[concurrency] = {field: statistics.median(r[field] for r in repeated) for field, _ in PANELS}
            result.append(Line(name, points))
    return result


def step(top: float) -> float:
    """The distance of four to eight round ticks from 0 to `top`."""
    size = 10.0 ** (len(str(int(top))) - 1 if top >= 1 else -1)
    return next(size * f for f in (0.1, 0.2, 0.25, 0.5, 1, 2) if top / (size * f) <= 8)


def marker(kind: str, x: float, y: float, color: str) -> str:
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>'
    corners = {
        "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        "triangle": ((0, -5), (5, 4), (-5, 4)),
        "diamond": ((0, -5), (5, 0), (0, 5), (-5, 0)),
    }
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners[kind])
    return f'<polygon points="{points}" fill="{color}"/>'


def text(x: float, y: float, what: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(what)}</text>'


def panel(left: float, field: str, title: str, some: list[Line]) -> list[str]:
    """Both axes from 0; `left`: of the plot."""
    widest = max(c for line in some for c in line.points) * 1.05
    highest = max(p[field] for line in some for p in line.points.values()) * 1.08 or 1.0
    out = [text(left + WIDTH / 2, TOP - 10, title, extra=' font-weight="bold"')]

    def at(concurrency: float, value: float) -> tuple[float, float]:
        return left + WIDTH * concurrency / widest, TOP + HEIGHT * (1 - value / highest)

    size = step(highest)
    for i in range(int(highest / size) + 1):
        _, y = at(0, i * size)
        out.append(f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{"#888" if i == 0 else "#ddd"}"/>')
        out.append(text(left - 6, y + 4, f"{i * size:,g}", "end"))
    free_from = left
    for concurrency in sorted({c for line in some for c in line.points}):
        x, y = at(concurrency, 0)
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 4:.1f}" stroke="#888"/>')
        if x >= free_from:
            out.append(text(x, y + 17, str(concurrency)))
            free_from = x + 24
    out.append(text(left + WIDTH / 2, TOP + HEIGHT + 34, "concurrency"))
    for i, line in enumerate(some):
        color, kind = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
        points = [at(c, p[field]) for c, p in line.points.items()]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [marker(kind, x, y, color) for x, y in points]
    return out


def draw(model: str, context: int, rows: list[Row]) -> str:
    some = lines(rows)
    width = len(PANELS) * (LEFT + WIDTH + GAP) + GAP
    out = [text(LEFT, 22, f"{model}, {context:,} tokens of context", "start", ' font-size="15" font-weight="bold"')]
    x = float(LEFT)
    for i, line in enumerate(some):
        out.append(marker(MARKERS[i % len(MARKERS)], x + 5, 40, COLORS[i % len(COLORS)]))
        out.append(text(x + 15, 44, line.name, "start"))
        x += 15 + 6.6 * len(line.name) + 22
    for i, (field, title) in enumerate(PANELS):
        out += panel(LEFT + i * (LEFT + WIDTH + GAP), field, title, some)
    width, height = max(width, int(x)), TOP + HEIGHT + BOTTOM
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    style = 'font-family="sans-serif" font-size="12" fill="#222">'
    return "\n".join([head + style, '<rect width="100%" height="100%" fill="white"/>', *out, "</svg>"]) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=Path, help="files of JSON lines")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs", help="folder of the figures")
    args = parser.parse_args(argv)
    try:
        found = figures(read(args.rows))
    except (OSError, ValueError) as error:
        print(f"plot_decode: error: {error}", file=sys.stderr)
        return 2
    if not found:
        print("plot_decode: error: no rows but references: nothing to draw", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    for (model, context), rows in found.items():
        path = args.out / f"decode_{Path(model).name}_{context}.svg"
        path.write_text(draw(model, context, rows), encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
