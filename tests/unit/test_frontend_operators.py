"""docs/operators.md names exactly the operators that the front end knows."""

from __future__ import annotations

import re
from pathlib import Path

from edgesdk.frontend import control, repair

DOCUMENT = Path(__file__).parents[2] / "docs" / "operators.md"


def named(heading: str) -> set[str]:
    """The operators in backquotes in one section of the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"`(\w+)`", section))


def test_onnx_operators() -> None:
    repair.load_all()
    known = {kind for domain, kind in repair.REPAIRS if not domain}
    refusing = named("ONNX operators that are refused")
    assert named("ONNX operators") | refusing >= known | repair.UNCHANGED | set(control.SPECIAL)
    assert named("ONNX operators") <= known | repair.UNCHANGED | set(control.SPECIAL)


def test_microsoft_operators() -> None:
    repair.load_all()
    known = {kind for domain, kind in repair.REPAIRS if domain == "com.microsoft"}
    assert named("Operators of com.microsoft") == known
