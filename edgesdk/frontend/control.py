"""Control flow and sequences: what can be decided while compiling is, the rest is refused.

`If` with a constant condition becomes its branch, with a run-time condition both branches and a
choice. `Loop` and `Scan` are unrolled; a Loop that may stop early keeps its values from then on.
Sequences and optionals exist only while the graph is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from edgesdk.frontend.graph import RefusedNodeError, Value

if TYPE_CHECKING:
    from edgesdk.frontend.walk import Env, Item, Scope, Walker

# A loop of more iterations than this is refused.
ITERATION_LIMIT = 256


@dataclass
class Special:
    """A node whose inputs may be sequences, or that has subgraphs."""

    node: onnx.NodeProto
    name: str
    items: list[Item]
    attrs: dict[str, Any]
    env: Env
    scope: Scope

    def tensor(self, index: int) -> Value:
        item = self.items[index] if index < len(self.items) else None
        if not isinstance(item, Value):
            raise RefusedNodeError(f"its input {index} is not a tensor")
        return item

    def maybe_constant(self, index: int) -> np.ndarray[Any, Any] | None:
        item = self.items[index] if index < len(self.items) else None
        return item.const if isinstance(item, Value) else None

    def position(self, index: int, length: int) -> int:
        """A constant position in a sequence, counted from the front."""
        array = self.maybe_constant(index)
        if array is None:
            raise RefusedNodeError("its position in the sequence is computed at run time")
        at = int(array.reshape(-1)[0])
        return at + length if at < 0 else at

    def sequence(self, index: int) -> list[Any]:
        item = self.items[index]
        if not isinstance(item, list):
            raise RefusedNodeError(f"its input {index} is not a sequence")
        return item


Handler = Callable[["Walker", Special], "list[Item]"]
SPECIAL: dict[str, Handler] = {}


def special(kind: str) -> Callable[[Handler], Handler]:
    def register(function: Handler) -> Handler:
        def guarded(walker: Walker, node: Special) -> list[Item]:
            from edgesdk.frontend.walk import UNKNOWN, Unknown

            if any(isinstance(i, Unknown) for i in node.items):
                return [UNKNOWN] * len(node.node.output)
            return function(walker, node)

        SPECIAL[kind] = guarded
        return guarded

    return register


@special("Identity")
def _identity(walker: Walker, node: Special) -> list[Item]:
    return [node.items[0]]


@special("If")
def _if(walker: Walker, node: Special) -> list[Item]:
    from edgesdk.frontend.walk import UNKNOWN, Unknown

    condition = node.tensor(0)
    branches = [node.attrs["then_branch"], node.attrs["else_branch"]]
    if condition.const is not None:
        chosen = branches[0 if bool(condition.const.reshape(-1)[0]) else 1]
        return walker.run_graph(chosen, node.env, {}, node.scope)
    walker.notes["If", "both branches are computed and one result is chosen"] += 1
    first = len(walker.refused)
    then, other = (walker.run_graph(g, node.env, {}, node.scope) for g in branches)
    # Whoever runs the model may never come to that branch: say why it matters.
    for index in range(first, len(walker.refused)):
        name, kind, reason = walker.refused[index]
        if "branch of" not in reason:
            reason = f"{reason}, in a branch of {node.name!r} (If) that is chosen at run time"
            walker.refused[index] = (name, kind, reason)
    results: list[Item] = []
    for a, b in zip(then, other, strict=True):
        if isinstance(a, Unknown) or isinstance(b, Unknown):
            results.append(UNKNOWN)
        elif not isinstance(a, Value) or not isinstance(b, Value):
            raise RefusedNodeError("its branches return sequences, chosen at run time")
        elif a.shape != b.shape or a.dtype != b.dtype:
            raise RefusedNodeError(
                f"its branches return different types, {type_text(a)} and {type_text(b)},"
                " chosen at run time"
            )
        elif a is b:
            results.append(a)
        else:
            results.append(walker.b("Where", _scalar(walker, condition), a, b))
    return results


def type_text(item: Item) -> str:
    """Says what an input is, e.g. "float32[1, 3]"."""
    if isinstance(item, Value):
        return f"{item.dtype.name}{list(item.shape)}"
    return "nothing" if item is None else "a sequence"


def _scalar(walker: Walker, value: Value) -> Value:
    return value if value.rank == 0 else walker.b.reshape(value, ())


@special("Loop")
def _loop(walker: Walker, node: Special) -> list[Item]:
    from edgesdk.frontend.walk import Unknown

    body: onnx.GraphProto = node.attrs["body"]
    trips_known = node.maybe_constant(0)
    has_trips = len(node.items) > 0 and node.items[0] is not None
    if has_trips and trips_known is None:
        raise RefusedNodeError("its trip count is computed at run time")
    trips = int(trips_known.reshape(-1)[0]) if trips_known is not None else None
    active = node.items[1] if len(node.items) > 1 else None
    carried = list(node.items[2:])
    scans: list[list[Value]] = [[] for _ in range(len(body.output) - 1 - len(carried))]
    count = 0
    walker.notes["Loop", "unrolled"] += 1
    while trips is None or count < trips:
        if isinstance(active, Value) and active.const is not None:
            if not bool(active.const.reshape(-1)[0]):
                break
            active = None
        if active is not None and (scans or trips is None):
            raise RefusedNodeError("it stops on a condition computed at run time")
        if count == ITERATION_LIMIT:
            raise RefusedNodeError(f"it runs more than {ITERATION_LIMIT} times")
        true = walker.b.constant(np.asarray(True))
        index = walker.b.constant(np.asarray(count, np.int64))
        names = [i.name for i in body.input]
        feeds = dict(zip(names, [index, active or true, *carried], strict=False))
        results = walker.run_graph(body, node.env, feeds, node.scope)
        if any(isinstance(r, Unknown) for r in results):
            return [Unknown() for _ in node.node.output]
        proceed, state = results[0], results[1 : 1 + len(carried)]
        if active is not None:
            state = [_choose(walker, active, n, o) for n, o in zip(state, carried, strict=True)]
            proceed = walker.b("And", _flag(walker, active), _flag(walker, proceed))
        carried = state
        for rows, row in zip(scans, results[1 + len(carried) :], strict=True):
            if not isinstance(row, Value):
                raise RefusedNodeError("it gathers sequences")
            rows.append(row)
        known = isinstance(proceed, Value) and proceed.const is not None
        active = None if known and bool(proceed.const.reshape(-1)[0]) else proceed  # type: ignore
        count += 1
    return [*carried, *(_stacked(walker, rows, 0) for rows in scans)]


def _flag(walker: Walker, item: Item) -> Value:
    if not isinstance(item, Value):
        raise RefusedNodeError("its condition is not a tensor")
    return _scalar(walker, item)


def _choose(walker: Walker, active: Item, new: Item, old: Item) -> Item:
    """The value of a carried variable after an iteration that may not have run."""
    if new is old:
        return old
    if not isinstance(new, Value) or not isinstance(old, Value):
        raise RefusedNodeError("it carries a sequence and may stop at run time")
    if new.shape != old.shape or new.dtype != old.dtype:
        raise RefusedNodeError("the shape it carries changes, and it may stop at run time")
    return walker.b("Where", _flag(walker, active), new, old)


def _stacked(walker: Walker, rows: list[Value], axis: int) -> Value:
    if not rows:
        raise RefusedNodeError("it gathers outputs but runs no iteration")
    if len({(r.shape, r.dtype) for r in rows}) > 1:
        raise RefusedNodeError("the shape of the outputs that it gathers changes")
    at = axis + rows[0].rank + 1 if axis < 0 else axis
    wide = [walker.b.reshape(r, (*r.shape[:at], 1, *r.shape[at:])) for r in rows]
    return walker.b.concat(wide, at)


@special("Scan")
def _scan(walker: Walker, node: Special) -> list[Item]:
    from edgesdk.frontend.walk import Unknown

    if node.scope.opsets.get("", 9) < 9:
        raise RefusedNodeError("Scan of operator set 8 is not supported")
    body: onnx.GraphProto = node.attrs["body"]
    scanned = int(node.attrs["num_scan_inputs"])
    states = list(node.items[: len(node.items) - scanned])
    inputs = [node.tensor(i) for i in range(len(states), len(node.items))]
    outputs = len(body.output) - len(states)
    in_axes = node.attrs.get("scan_input_axes") or [0] * scanned
    in_axes = [a + v.rank if a < 0 else a for a, v in zip(in_axes, inputs, strict=True)]
    out_axes = node.attrs.get("scan_output_axes") or [0] * outputs
    backward_in = node.attrs.get("scan_input_directions") or [0] * scanned
    backward_out = node.attrs.get("scan_output_directions") or [0] * outputs
    length = inputs[0].shape[in_axes[0]]
    if length > ITERATION_LIMIT:
        raise RefusedNodeError(f"it runs {length} times; the limit is {ITERATION_LIMIT}")
    walker.notes["Scan", "unrolled"] += 1
    rows: list[list[Value]] = [[] for _ in range(outputs)]
    names = [i.name for i in body.input]
    for step in range(length):
        slices = [
            walker.b(
                "Gather",
                v,
                walker.b.constant(np.asarray(length - 1 - step if back else step, np.int64)),
                axis=a,
            )
            for v, a, back in zip(inputs, in_axes, backward_in, strict=True)
        ]
        feeds = dict(zip(names, [*states, *slices], strict=True))
        results = walker.run_graph(body, node.env, feeds, node.scope)
        if any(isinstance(r, Unknown) for r in results):
            return [Unknown() for _ in node.node.output]
        states = results[: len(states)]
        for gathered, row in zip(rows, results[len(states) :], strict=True):
            if not isinstance(row, Value):
                raise RefusedNodeError("it gathers sequences")
            gathered.append(row)
    ordered = [r[::-1] if back else r for r, back in zip(rows, backward_out, strict=True)]
    return [*states, *(_stacked(walker, r, a) for r, a in zip(ordered, out_axes, strict=True))]


@special("SequenceEmpty")
def _sequence_empty(walker: Walker, node: Special) -> list[Item]:
    return [[]]


@special("SequenceConstruct")
def _sequence_construct(walker: Walker, node: Special) -> list[Item]:
    return [list(node.items)]


@special("SequenceInsert")
def _sequence_insert(walker: Walker, node: Special) -> list[Item]:
    items = list(node.sequence(0))
    at = node.position(2, len(items)) if len(node.items) > 2 and node.items[2] else len(items)
    items.insert(at, node.tensor(1))
    return [items]


@special("SequenceErase")
def _sequence_erase(walker: Walker, node: Special) -> list[Item]:
    items = list(node.sequence(0))
    at = node.position(1, len(items)) if len(node.items) > 1 and node.items[1] else -1
    del items[at]
    return [items]


@special("SequenceAt")
def _sequence_at(walker: Walker, node: Special) -> list[Item]:
    items = node.sequence(0)
    return [items[node.position(1, len(items))]]


@special("SequenceLength")
def _sequence_length(walker: Walker, node: Special) -> list[Item]:
    return [walker.b.constant(np.asarray(len(node.sequence(0)), np.int64))]


@special("ConcatFromSequence")
def _concat_from_sequence(walker: Walker, node: Special) -> list[Item]:
    items = node.sequence(0)
    axis = int(node.attrs.get("axis", 0))
    if node.attrs.get("new_axis", 0):
        return [_stacked(walker, items, axis)]
    return [walker.b.concat(items, axis)]


@special("SplitToSequence")
def _split_to_sequence(walker: Walker, node: Special) -> list[Item]:
    data = node.tensor(0)
    axis = int(node.attrs.get("axis", 0)) % data.rank
    length = data.shape[axis]
    given = len(node.items) > 1 and node.items[1] is not None
    split = node.maybe_constant(1)
    if given and split is None:
        raise RefusedNodeError("its split sizes are computed at run time")
    if split is not None and split.ndim == 1:
        sizes = [int(s) for s in split]
    else:
        step = int(split) if split is not None else 1
        sizes = [min(step, length - at) for at in range(0, length, step)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [walker.b.slice(data, axis, s, s + n) for s, n in zip(starts, sizes, strict=True)]
    if split is None and not node.attrs.get("keepdims", 1):
        parts = [walker.b.reshape(p, p.shape[:axis] + p.shape[axis + 1 :]) for p in parts]
    return [list(parts)]


@special("Optional")
def _optional(walker: Walker, node: Special) -> list[Item]:
    return [node.items[0] if node.items else None]


@special("OptionalGetElement")
def _optional_get(walker: Walker, node: Special) -> list[Item]:
    if node.items[0] is None:
        raise RefusedNodeError("it opens an optional that is empty")
    return [node.items[0]]


@special("OptionalHasElement")
def _optional_has(walker: Walker, node: Special) -> list[Item]:
    has = bool(node.items) and node.items[0] is not None
    return [walker.b.constant(np.asarray(has))]
