"""benchmarks/plot_decode.py draws a figure a context from rows made up here."""

from __future__ import annotations

import importlib.util
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plot() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plot_decode", ROOT / "benchmarks/plot_decode.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def row(mode: str, context: int, concurrency: int, tok_s: float = 100.0, **more: object) -> dict[str, object]:
    running = min(concurrency, 24)
    known = {"mode": mode, "model": "qwen3-8b", "context": context, "concurrency": concurrency, "running": running}
    return known | {"tok_s": tok_s, "tpot_ms": running / tok_s * 1e3, "fetch_ratio": "0.05", "drafter": "ngram"} | more


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_a_figure_a_context(plot: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(mode, context, c, c * 10.0) for mode in ("oasis", "dense") for context in (16384, 32768) for c in (8, 16, 32)]
    rows += [row("oasis", 32768, 8, 500.0, fetch_ratio="0.02"), row("vllm", 4096, 8)]
    reference = ROOT / "benchmarks/results/vllm_h200.jsonl"
    assert plot.main([str(write(tmp_path / "rows.jsonl", rows)), str(reference), "--out", str(tmp_path / "out")]) == 0
    drawn = [Path(line) for line in capsys.readouterr().out.split()]
    assert [p.name for p in drawn] == ["decode_qwen3-8b_16384.svg", "decode_qwen3-8b_32768.svg"]  # a reference alone makes none
    expected = [["dense", "oasis", "vLLM, dense"], ["dense", "oasis, fetch_ratio 0.02", "oasis, fetch_ratio 0.05", "vLLM, dense"]]
    for path, names in zip(drawn, expected, strict=True):
        svg = ElementTree.parse(path).getroot()
        texts = [t.text for t in svg.iter(f"{SVG}text")]
        assert [t for t in texts if t in names] == names
        assert {title for _, title in plot.PANELS} <= set(texts)
        paths = list(svg.iter(f"{SVG}polyline"))
        assert len(paths) == len(names) * len(plot.PANELS)
        width, height = float(svg.get("width") or 0), float(svg.get("height") or 0)
        for x, y in (point.split(",") for p in paths for point in str(p.get("points")).split()):
            assert 0 < float(x) < width and 0 < float(y) < height


def test_repeated_rows_are_drawn_at_their_median(plot: ModuleType) -> None:
    (line,) = plot.lines([row("dense", 1, 8, t) for t in (100.0, 900.0, 200.0)])
    assert line.name == "dense" and line.points[8]["tok_s"] == 200.0


@pytest.mark.parametrize("top", [0.3, 1, 7, 9.9, 10, 34.2, 1304, 3990, 99_999])
def test_ticks_are_few_and_round(plot: ModuleType, top: float) -> None:
    assert 3 <= top / plot.step(top) <= 8


def test_the_reference_rows_say_where_they_are_from(plot: ModuleType) -> None:
    rows = plot.read([ROOT / "benchmarks/results/vllm_h200.jsonl"])
    assert len(rows) == 5 and all("vLLM 0.24.0" in r["source"] for r in rows)
    for r in rows:
        assert r["tok_s"] == pytest.approx(r["running"] / r["tpot_ms"] * 1e3, rel=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "rows.jsonl:1: not a JSON object"),
        ("3", "not a JSON object"),
        ('{"mode": "dense"}', "no model, context"),
        ("", "nothing to draw"),
    ],
)
def test_what_cannot_be_drawn_is_named(
    plot: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    assert plot.main([str(path), "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
