"""Scheduled GPU kernels to source text, and to the list of launches that run them.

TVM splits a kernel into functions of the GPU and a host function that launches them. All sizes are
fixed, so that host function says nothing but constants: it is read here, and the launches go into
the flat plan. No host code of TVM reaches the device.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from edgesdk.compiler.codegen import last_words
from edgesdk.errors import CompileError

# What TVM sets before a launch; edgert does it once, when it opens the device.
_IGNORED_CALLS = ("__tvm_set_device",)
_DYNAMIC_SHARED = "tirx.use_dyn_shared_memory"
_AXES = ("x", "y", "z")


@dataclass(frozen=True)
class Launch:
    """One launch of a GPU function. `grid` and `block` count x, y, z; `shared_bytes` is dynamic
    shared memory.

    `args` numbers the tensors whose addresses it takes: first the kernel's parameters in order,
    then its workspaces.
    """

    function: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    args: tuple[int, ...]
    starts_early: bool = False  # it waits for the launch before it by itself (see cuda.py)


@dataclass(frozen=True)
class DeviceKernel:
    """A kernel as launches. `workspaces` are the sizes in bytes of scratch memory between them."""

    launches: tuple[Launch, ...]
    workspaces: tuple[int, ...]


@dataclass(frozen=True)
class DeviceCode:
    """`source` has the functions of all `kernels` (by symbol), in the language of the GPU's API."""

    source: str
    kernels: dict[str, DeviceKernel]


def generate(functions: dict[str, Any], target: Any) -> DeviceCode:
    """Returns the device code of `functions` (symbol -> PrimFunc scheduled for a GPU).

    `target` is a TVM target with a host. Raises CompileError if a kernel cannot be split into
    launches of fixed size.
    """
    try:
        return _generate(functions, target)
    except CompileError:
        if target.kind.name != "metal":
            raise
    # For Metal TVM turns arrays that are accessed by vectors, too, into arrays of vectors, and
    # stops where it cannot tell which lane an access is to (VectorTypeRewriter).
    scalar = {name for name, function in functions.items() if _fails({name: function}, target)}
    return _generate(functions, target, scalar)


def _fails(functions: dict[str, Any], target: Any) -> bool:
    try:
        _generate(functions, target)
    except CompileError:
        return True
    return False


def _generate(functions: dict[str, Any], target: Any, scalar: Collection[str] = ()) -> DeviceCode:
    """As `generate`; the functions `scalar` go through vectors one element after the other."""
    import tvm

    module = tvm.IRModule(
        {name: function.with_attr("global_symbol", name) for name, function in functions.items()}
    )
    module = _without_vectors(module, scalar)
    # Copies that a schedule marks as asynchronous become such; it marks none for an old GPU.
    config = {"tirx.use_async_copy": True} if target.kind.name == "cuda" else {}
    config |= dict(tvm.transform.PassContext.current().config)
    try:
        with tvm.transform.PassContext(config=config):
            host, device, device_target = _split(module, target)
            if bools := _with_vectors_of_bools(device, target.kind.name):
                module = _without_vectors(module, bools)
                host, device, device_target = _split(module, target)
        with _no_compiler():
            source = str(
                tvm.get_global_func(f"target.build.{device_target.kind.name}")(
                    device, device_target
                ).inspect_source()
            )
    except Exception as error:  # TVM raises many types; all mean the same here
        raise CompileError(
            f"TVM could not generate code for the GPU: {last_words(error)}",
            hint="please report this with the model's operators (`edgesdk inspect`)",
        ) from error
    host_functions = {gv.name_hint: function for gv, function in host.functions.items()}
    kernels = {name: _read_host(name, host_functions[name]) for name in functions}
    _check_arguments(kernels, target)
    return DeviceCode(source, kernels)


_COMPILER = "tvm_callback_cuda_compile"


@contextlib.contextmanager
def _no_compiler() -> Iterator[None]:
    """On a machine with an NVIDIA driver TVM compiles its code at once, for the GPU that is there,
    and fails without the packages for that. Here cuda.py does it, for the target's GPU."""
    import tvm_ffi

    found = tvm_ffi.get_global_func(_COMPILER, allow_missing=True)
    tvm_ffi.register_global_func(_COMPILER, lambda code: b"-", override=True)
    try:
        yield
    finally:
        if found is None:
            tvm_ffi.remove_global_func(_COMPILER)
        else:
            tvm_ffi.register_global_func(_COMPILER, found, override=True)


def _split(module: Any, target: Any) -> tuple[Any, Any, Any]:
    import tvm
    from tvm.tirx.build import split_host_device_mods

    module = tvm.tirx.transform.BindTarget(target)(module)
    pipeline, _, finish_device = tvm.tirx.get_default_tir_pipeline(target)
    host, devices = split_host_device_mods(pipeline(module))
    if not devices:
        raise CompileError("none of its loops is bound to the GPU")
    ((device_target, device),) = devices.items()
    return host, finish_device()(device), device_target


def _with_vectors_of_bools(device: Any, kind: str) -> set[str]:
    """The kernels with vectors of bools that TVM writes wrongly.

    In OpenCL C a vector's "true" is -1 (OpenCL C specification, "Relational Operators"), which TVM
    takes for 1, as it is elsewhere. In CUDA they are 16-bit integers, which is right between a
    comparison and what it selects, and wrong in memory.
    """
    import tvm
    import tvm_ffi
    from tvm import tirx

    comparisons = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)
    found = set()
    for variable, function in device.functions.items():
        name = re.sub(r"_kernel(_\d+)?$", "", variable.name_hint)
        counts = {"all": 0, "right": 0}

        def visit(node: Any, counts: dict[str, int] = counts) -> None:
            if _is_vector_of_bools(node):
                counts["all"] += 1
            if isinstance(node, tirx.Select) and isinstance(node.condition, comparisons):
                counts["right"] += _is_vector_of_bools(node.condition)

        tvm_ffi.structural_walk(function.body, (tvm.ir.Expr, visit))
        if counts["all"] > (counts["right"] if kind == "cuda" else 0):
            found.add(name)
    return found


def _is_vector_of_bools(node: Any) -> bool:
    return re.fullmatch(r"boolx\d+", str(node.ty)) is not None


def _without_vectors(module: Any, names: Collection[str]) -> Any:
    """`module` whose functions `names` go through vectors one element after the other."""
    import tvm
    import tvm_ffi

    def serial(loop: Any) -> Any:
        if loop.kind != tvm.tirx.ForKind.VECTORIZED:
            return loop
        return tvm.tirx.For(
            loop.loop_var, loop.min, loop.extent, tvm.tirx.ForKind.SERIAL, loop.body
        )

    return tvm.IRModule(
        {
            variable: tvm_ffi.structural_map(function, (tvm.tirx.For, serial))
            if variable.name_hint in names
            else function
            for variable, function in module.functions.items()
        }
    )


def _check_arguments(kernels: dict[str, DeviceKernel], target: Any) -> None:
    """Metal binds each tensor to one of few places; where TVM knows of a limit it only warns."""
    most = target.attrs.get("max_function_args")
    for name, kernel in kernels.items():
        count = max(len(launch.args) for launch in kernel.launches)
        if most is not None and 0 < int(most) < count:
            raise CompileError(f"kernel {name} takes {count} tensors, the GPU's kernels {most}")


@dataclass
class _HostReader:
    """What the host function has bound so far."""

    name: str
    values: dict[int, Any]  # a variable's handle -> the expression it stands for
    buffers: dict[int, Any]  # a buffer's handle -> the expression of its memory
    workspaces: dict[int, int]  # a buffer's handle -> number
    workspace_bytes: list[int]
    num_parameters: int
    launches: list[Launch]


def _read_host(name: str, function: Any) -> DeviceKernel:
    reader = _HostReader(name, {}, {}, {}, [], 0, [])
    _count_parameters(reader, function.body)
    _read(reader, function.body)
    if not reader.launches:
        raise CompileError(f"kernel {name} launches nothing")
    return DeviceKernel(tuple(reader.launches), tuple(reader.workspace_bytes))


def _count_parameters(reader: _HostReader, body: Any) -> None:
    """The first statement of a packed function compares the number of its arguments."""
    from tvm import tirx

    first = body.seq[0] if isinstance(body, tirx.SeqStmt) else body
    reader.num_parameters = int(first.condition.b)


def _read(reader: _HostReader, statement: Any) -> None:
    from tvm import tirx

    if isinstance(statement, tirx.SeqStmt):
        for each in statement.seq:
            _read(reader, each)
    elif isinstance(statement, tirx.AttrStmt):
        _read(reader, statement.body)
    elif isinstance(statement, tirx.Bind):
        reader.values[statement.var.id_] = statement.value
    elif isinstance(statement, tirx.DeclBuffer):
        reader.buffers[statement.buffer.id_] = statement.data
    elif isinstance(statement, tirx.AllocBuffer):
        buffer = statement.buffer
        reader.workspaces[buffer.id_] = len(reader.workspace_bytes)
        reader.workspace_bytes.append(_size_of(buffer))
    elif isinstance(statement, tirx.Evaluate):
        _read_call(reader, statement.value)
    elif not isinstance(statement, (tirx.AssertStmt, tirx.IfThenElse)) and (
        type(statement).__name__ != "Return"
    ):
        raise CompileError(
            f"kernel {reader.name}: its launches depend on a {type(statement).__name__}"
        )


def _size_of(buffer: Any) -> int:
    """Bytes of a buffer, whose elements may be vectors."""
    import tvm_ffi

    dtype = tvm_ffi.dtype(str(buffer.dtype))
    count = dtype.lanes
    for dim in buffer.shape:
        count *= int(dim)
    return count * -(-dtype.bits // 8)


def _read_call(reader: _HostReader, call: Any) -> None:
    operator = getattr(getattr(call, "op", None), "name", "")
    if operator == "tirx.tvm_call_packed" and str(call.args[0].value) in _IGNORED_CALLS:
        return
    if operator != "tirx.call_ffi_kernel":
        if operator:
            raise CompileError(f"kernel {reader.name}: the host calls {operator}")
        return
    tags = [str(t) for t in call.attrs.launch_params]
    arguments = list(call.args[1 : len(call.args) - sum(t != _DYNAMIC_SHARED for t in tags)])
    if _DYNAMIC_SHARED in tags:
        raise CompileError(f"kernel {reader.name}: dynamic shared memory")
    sizes = [int(a) for a in call.args[1 + len(arguments) :]]
    extents = dict(zip(tags, sizes, strict=True))
    reader.launches.append(
        Launch(
            function=str(call.args[0].value),
            grid=_extent3(extents, "blockIdx"),
            block=_extent3(extents, "threadIdx"),
            shared_bytes=0,
            args=tuple(_argument(reader, a) for a in arguments),
        )
    )


def _extent3(extents: dict[str, int], name: str) -> tuple[int, int, int]:
    x, y, z = (extents.get(f"{name}.{axis}", 1) for axis in _AXES)
    return x, y, z


def _argument(reader: _HostReader, expr: Any) -> int:
    """The number of the parameter or workspace whose address `expr` is."""
    operator = getattr(getattr(expr, "op", None), "name", "")
    if operator == "tirx.buffer_data":
        buffer = expr.args[0].id_
        if buffer in reader.workspaces:
            return reader.num_parameters + reader.workspaces[buffer]
        return _argument(reader, reader.buffers[buffer])
    if operator == "tirx.reinterpret":
        return _argument(reader, expr.args[0])
    if operator == "tirx.tvm_struct_get":
        # Address of the DLTensor that parameter `n` of the packed call points to.
        choice = reader.values[expr.args[0].id_]  # a plain DLTensor, or one within an object
        return int(choice.args[-1].args[1])
    raise CompileError(f"kernel {reader.name}: a launch takes {str(expr)[:80]}, no tensor")
