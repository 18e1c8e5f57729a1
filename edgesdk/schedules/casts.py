"""Casts that do nothing: numbers that are quantised and used as floats again in the same kernel."""

from __future__ import annotations

from typing import Any

_RANGES = {"uint8": (0, 255), "int8": (-128, 127)}


def drop_round_trips(function: Any) -> Any:
    """Returns `function` (a scheduled PrimFunc) without float32 -> int32 -> 8 bits -> float32 where
    the number is a whole one and within the range, so that the way there and back changes nothing.
    """
    from tvm import tirx
    from tvm_ffi import structural_map

    def shorter(cast: Any) -> Any:
        narrow = cast.value
        limits = _RANGES.get(_dtype(narrow))
        if _dtype(cast) != "float32" or limits is None or not _is(narrow, "Cast"):
            return cast
        wide = narrow.value
        if _dtype(wide) != "int32" or not _is(wide, "Cast") or not _is_whole(wide.value, limits):
            return cast
        return wide.value

    return structural_map(function, (tirx.Cast, shorter))


def _is(expr: Any, name: str) -> bool:
    return type(expr).__name__ == name


def _is_whole(expr: Any, limits: tuple[int, int]) -> bool:
    """min(high, max(low, nearbyint(x) [+ a whole number])), whichever argument comes first."""
    for name, bound in (("Min", limits[1]), ("Max", limits[0])):
        if not _is(expr, name):
            return False
        parts = [p for p in (expr.a, expr.b) if not _is(p, "FloatImm")]
        bounds = [float(p.value) for p in (expr.a, expr.b) if _is(p, "FloatImm")]
        if len(parts) != 1 or bounds != [bound]:
            return False
        expr = parts[0]
    if _is(expr, "Add") and _is(expr.b, "FloatImm") and float(expr.b.value).is_integer():
        expr = expr.a
    return _is(expr, "Call") and getattr(expr.op, "name", "") == "tirx.nearbyint"


def _dtype(expr: Any) -> str:
    return str(getattr(expr.ty, "dtype", ""))
