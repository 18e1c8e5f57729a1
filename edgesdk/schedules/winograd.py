"""3x3 convolutions by Winograd's minimal filtering F(2x2, 3x3).

Each 2x2 tile of outputs comes from a 4x4 tile of inputs through 16 products a channel pair instead
of 36 (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016). Three kernels:
the input's tiles are transformed, 16 independent matrix products run through the template of the
direct convolution, and the results are transformed back. All constants are 0, 1, -1 and 1/2, so the
rounding is that of a few more additions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgesdk.profiles import TargetProfile
from edgesdk.schedules import tiles
from edgesdk.schedules.conv2d import DIRECT, Conv2d
from edgesdk.schedules.template import Knobs, Template

if TYPE_CHECKING:
    import numpy as np

INPUT = "winograd_input"
OUTPUT = "winograd_output"

# Below these the transforms cost more than the products save (measured, see docs/schedules.md).
MIN_CHANNELS = 128


def fits(config: Conv2d) -> bool:
    """Whether `config` is a convolution that the method serves, and large enough to gain."""
    _, channels, _, _ = config.in_shape
    _, out_channels, height, width = config.out_shape
    return (
        config.kind == "direct"
        and config.window == (3, 3)
        and config.stride == (1, 1)
        and config.dilation == (1, 1)
        and height % 2 == 0
        and width % 2 == 0
        and channels % config.block == 0
        and channels >= MIN_CHANNELS
        and out_channels >= MIN_CHANNELS
    )


def pack_weight(weight: np.ndarray, block: int) -> np.ndarray:
    """[O, I, 3, 3] -> G w G^T as [16, O/b, I/b, b, b], zeros beyond O."""
    import numpy as np

    g = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    transformed = np.einsum("ui,ocij,vj->uvoc", g, weight, g)
    out_channels, channels = weight.shape[:2]
    wide = np.zeros((16, -(-out_channels // block) * block, channels), weight.dtype)
    wide[:, :out_channels] = transformed.reshape(16, out_channels, channels)
    split = wide.reshape(16, -1, block, channels // block, block)
    return np.ascontiguousarray(split.transpose(0, 1, 3, 4, 2))


def transform_input(padded: Any, config: Conv2d) -> Any:
    """[N, C/b, H+2, W+2, b] (see `conv2d.pad_spatial`) -> [16, C/b, N*H/2*W/2, b]."""
    from tvm import te, tirx

    n, blocks, _, _, block = (int(d) for d in padded.shape)
    rows, columns = config.out_shape[2] // 2, config.out_shape[3] // 2

    def element(e: Any, c: Any, t: Any, b: Any) -> Any:
        picture, y, x = t // (rows * columns), t // columns % rows * 2, t % columns * 2

        def line(j: Any) -> Any:
            return _combined(e // 4, lambda i: padded[picture, c, y + i, x + j, b])

        return _combined(e % 4, line)

    def _combined(which: Any, at: Any) -> Any:
        # Rows of B^T: d0 - d2, d1 + d2, d2 - d1, d1 - d3.
        last = tirx.if_then_else(which == 2, at(2) - at(1), at(1) - at(3))
        last = tirx.if_then_else(which == 1, at(1) + at(2), last)
        return tirx.if_then_else(which == 0, at(0) - at(2), last)

    return te.compute(
        (16, blocks, n * rows * columns, block),
        element,
        name="winograd_input",
        attrs={"edgesdk.template": INPUT},
    )


def multiply(data: Any, weight: Any) -> Any:
    """[16, I/b, T, b] times [16, O/b, I/b, b, b] -> [16, O/b, T, b]."""
    from tvm import te

    _, in_blocks, count, block = (int(d) for d in data.shape)
    blocks = int(weight.shape[1])
    rc = te.reduce_axis((0, in_blocks), "co")
    ri = te.reduce_axis((0, block), "ci")
    return te.compute(
        (16, blocks, count, block),
        lambda e, o, t, b: te.sum(data[e, rc, t, ri] * weight[e, o, rc, ri, b], axis=[rc, ri]),
        name="winograd_products",
        attrs={"edgesdk.template": DIRECT, "edgesdk.row": 0},
    )


def transform_output(products: Any, config: Conv2d) -> Any:
    """[16, O/b, N*H/2*W/2, b] -> [N, O/b, H*W, b]."""
    from tvm import te, tirx

    _, blocks, _, block = (int(d) for d in products.shape)
    n, _, height, width = config.out_shape
    rows, columns = height // 2, width // 2

    def element(i: Any, o: Any, p: Any, b: Any) -> Any:
        y, x = p // width, p % width
        t = (i * rows + y // 2) * columns + x // 2

        def line(u: int) -> Any:
            return _combined(x % 2, lambda v: products[4 * u + v, o, t, b])

        return _combined(y % 2, line)

    def _combined(which: Any, at: Any) -> Any:
        # Rows of A^T: m0 + m1 + m2, m1 - m2 - m3.
        return tirx.if_then_else(which == 0, at(0) + at(1) + at(2), at(1) - at(2) - at(3))

    return te.compute(
        (n, blocks, height * width, block),
        element,
        name="winograd_output",
        tag="injective",
        attrs={"edgesdk.template": OUTPUT, "edgesdk.row": width},
    )


def _nothing(sch: Any, block: Any, profile: TargetProfile) -> dict[str, Any]:
    """The transforms are bound by memory: there is nothing to choose."""
    return {}


def _schedule_input(sch: Any, block: Any, profile: TargetProfile, knobs: Knobs) -> None:
    """All 16 results of a tile together: they share its inputs."""
    e, c, t, b = sch.get_loops(block)
    sch.reorder(c, t, e, b)
    task = sch.fuse(c, t)
    sch.unroll(e)
    sch.vectorize(b)
    if tiles.work(sch, block) >= tiles.PARALLEL_WORK:
        sch.parallel(task)


def _schedule_output(sch: Any, block: Any, profile: TargetProfile, knobs: Knobs) -> None:
    """The four outputs of a tile together, with the epilogue inlined."""
    width = int(sch.get(block).annotations["edgesdk.row"])
    blocks = list(sch.get_child_blocks(sch.get_sblock("root")))
    for each in blocks[:-1]:
        sch.compute_inline(each)
    out = blocks[-1]
    n, o, p, b = sch.get_loops(out)
    ty, r, tx, s = sch.split(p, [None, 2, width // 2, 2])
    sch.reorder(n, o, ty, tx, r, s, b)
    task = sch.fuse(n, o, ty)
    for loop in (r, s):
        sch.unroll(loop)
    sch.vectorize(b)
    if tiles.work(sch, out) >= tiles.PARALLEL_WORK:
        sch.parallel(task)


TEMPLATES = (
    Template(INPUT, _nothing, _nothing, _schedule_input),
    Template(OUTPUT, _nothing, _nothing, _schedule_output),
)
