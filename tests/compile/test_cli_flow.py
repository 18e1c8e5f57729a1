"""From a model to measured results on this machine, and every wrong model, by the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import Cli
from onnx import TensorProto, helper, numpy_helper

import edgesdk
from edgesdk.errors import UsageError


def save_model(
    path: Path, *, external: bool = False, seed: int = 0, operator: str = "Relu"
) -> Path:
    """A convolution, `operator` and a sum over pixels; the batch and the width are left open."""
    weight = np.random.default_rng(seed).standard_normal((4, 3, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["in:0", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
            helper.make_node(operator, ["c"], ["r"], name="act"),
            helper.make_node("GlobalAveragePool", ["r"], ["out.0"], name="pool"),
        ],
        "net",
        [helper.make_tensor_value_info("in:0", TensorProto.FLOAT, ["N", 3, 8, "W"])],
        [helper.make_tensor_value_info("out.0", TensorProto.FLOAT, ["N", 4, 1, 1])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save_model(
        model,
        path,
        save_as_external_data=external,
        location="weights.bin",
        size_threshold=0,
    )
    return path


def spoil_text(here: Path) -> None:
    (here / "net.onnx").write_text("this is no model\n" * 20, encoding="utf-8")


def spoil_half(here: Path) -> None:
    save_model(here / "net.onnx")
    content = (here / "net.onnx").read_bytes()
    (here / "net.onnx").write_bytes(content[: len(content) // 2])


def spoil_external(here: Path) -> None:
    save_model(here / "net.onnx", external=True)
    (here / "weights.bin").unlink()


def spoil_external_half(here: Path) -> None:
    save_model(here / "net.onnx", external=True)
    (here / "weights.bin").write_bytes((here / "weights.bin").read_bytes()[:100])


def unknown_operator(here: Path) -> None:
    save_model(here / "net.onnx", operator="NonMaxSuppression")


def no_file(here: Path) -> None:
    pass


def good(here: Path) -> None:
    save_model(here / "net.onnx")


def output_is_no_bundle(here: Path) -> None:
    good(here)
    (here / "out").mkdir()
    (here / "out" / "thesis.tex").write_text("years of work", encoding="utf-8")


TO = "--target local -o out --shape in:0=1x3x8x8"


@pytest.mark.parametrize(
    ("name", "spoil", "options", "code"),
    [
        ("not-onnx", spoil_text, TO, 5),
        ("truncated", spoil_half, TO, 5),
        ("missing-model", no_file, TO, 2),
        ("missing-external-data", spoil_external, TO, 5),
        ("short-external-data", spoil_external_half, TO, 5),
        ("compile-unknown-target", good, TO.replace("local", "rpi44"), 2),
        ("unknown-precision", good, f"{TO} --precision fp23", 2),
        ("open-shape", good, "--target local -o out", 2),
        ("unknown-input", good, f"{TO} --shape y=1x3", 2),
        ("contradicting-shape", good, "--target local -o out --shape in:0=1x4x8x8", 2),
        ("wrong-rank", good, "--target local -o out --shape in:0=1x3x8", 2),
        ("output-is-no-bundle", output_is_no_bundle, TO, 2),
    ],
)
def test_wrong_models_and_arguments(
    cli: Cli, name: str, spoil: Callable[[Path], None], options: str, code: int
) -> None:
    spoil(cli.here)
    before = sorted(p.relative_to(cli.here) for p in cli.here.rglob("*"))
    said = cli("compile", "net.onnx", *options.split())
    assert said.code == code, said.err
    said = cli.golden(f"error-{name}", "compile", "net.onnx", *options.split())
    assert said.out == ""
    # One error line and one hint line after the stages, and nothing half-written.
    lines = [line for line in said.err.splitlines() if not line.startswith("local: ")]
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]
    assert sorted(p.relative_to(cli.here) for p in cli.here.rglob("*")) == before


def test_a_refused_model_names_its_nodes(cli: Cli) -> None:
    unknown_operator(cli.here)
    shape = "in:0=1x3x8x8"
    said = cli("compile", "net.onnx", "--target", "local", "--shape", shape, "--json")
    assert said.code == 5
    assert {n["node"] for n in said.json["error"]["nodes"]} == {"act"}
    inspected = cli.succeeds("inspect", "net.onnx", "--shape", shape, "--json").json
    assert [r["node"] for r in inspected["refused"]] == ["act"]
    assert "refused\n  act  NonMaxSuppression" in cli("inspect", "net.onnx", "--shape", shape).out


def test_inspect(cli: Cli) -> None:
    save_model(cli.here / "net.onnx")
    assert cli.golden("inspect-open", "inspect", "net.onnx").code == 0
    assert cli.golden("inspect", "inspect", "net.onnx", "--shape", "in:0=2x3x8x8").code == 0
    report = cli.succeeds("inspect", "net.onnx", "--shape", "in:0=2x3x8x8", "--json").json
    assert report["parameters"] == 4 * 3 * 3 * 3
    assert report["operators"] == {"Conv": 1, "Relu": 1, "GlobalAveragePool": 1}
    assert report["inputs"] == [{"name": "in:0", "dtype": "float32", "shape": [2, 3, 8, 8]}]
    assert report["needs"] is None and report["refused"] == []


def test_init_leaves_open_shapes_to_the_user(cli: Cli) -> None:
    save_model(cli.here / "net.onnx")
    said = cli.succeeds("init", "net.onnx")
    assert "fill in [shapes]" in said.err
    text = (cli.here / "edgesdk.toml").read_text(encoding="utf-8")
    assert '# "in:0" = [N, 3, 8, W]' in text
    assert cli("compile").code == 2
    (cli.here / "edgesdk.toml").write_text(
        text.replace('# "in:0" = [N, 3, 8, W]', "").replace(
            "[shapes]", '[shapes]\n"in:0" = [1, 3, 8, 8]'
        ),
        encoding="utf-8",
    )
    cli.succeeds("inspect")


def test_init_takes_the_device_that_serves_the_target(cli: Cli) -> None:
    save_model(cli.here / "net.onnx")
    cli.succeeds("devices", "add", "board", "--ssh", "pi@host", "--target", "rpi4")
    options = ["--target", "local", "--target", "rpi4", "--shape", "in:0=1x3x8x8"]
    said = cli.succeeds("init", "net.onnx", *options, "--json")
    assert said.json["shapes"] == {"in:0": [1, 3, 8, 8]}
    assert said.json["targets"]["rpi4"]["device"] == "board"
    assert said.json["targets"]["local"]["device"] is None
    assert cli("init", "net.onnx", "--target", "rpi44").code == 2


def test_the_whole_way(cli: Cli) -> None:
    model = save_model(cli.here / "net.onnx")
    cli.succeeds("init", "net.onnx", "--shape", "in:0=1x3x8x8")

    # A deeper folder: the project file is found, and its paths are relative to itself.
    inner = cli.here / "deep"
    inner.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(inner)
        said = cli.succeeds("compile", "--json")
    (built,) = said.json["bundles"]
    folder = cli.here / "bundles" / "net-local"
    assert built["bundle"] == str(folder) and built["target"] == "local"
    assert built["verification"]["how"] == "native"
    assert built["verification"]["max_relative_error"] <= 1e-4
    assert built["library_bytes"] == (folder / "lib" / "libnet.so").stat().st_size
    assert list(inner.iterdir()) == []

    text = cli.succeeds("compile").out
    for word in ("bundles/net-local", "in:0 float32 1x3x8x8", "verified     native", "kernels"):
        assert word in text

    x = np.random.default_rng(3).standard_normal((1, 3, 8, 8)).astype(np.float32)
    np.save("x.npy", x)
    expected = reference(model, x)
    said = cli.succeeds("run", "--input", "in:0=x.npy", "--output", "out", "--json")
    (output,) = said.json["outputs"]
    assert output["name"] == "out.0"
    np.testing.assert_allclose(np.load(output["file"]), expected, rtol=1e-4, atol=1e-5)

    checks = cli.succeeds("verify", "--seeds", "2", "--json").json["checks"]
    assert [c["name"] for c in checks] == ["golden inputs", "drawn inputs 1", "drawn inputs 2"]

    bench = ["bench", "--repeat", "10", "--per-layer", "--against", "onnxruntime", "--threads", "1"]
    report = cli.succeeds(*bench, "--json").json
    assert report["latency"]["runs"] == 10 and report["threads"] == 1
    assert len(report["layers"]) == built_kernels(folder)
    (other,) = report["against"]
    assert other["opponent"] == "onnxruntime" and other["latency"]["runs"] == 10
    assert len(other["turn_speedups"]) == 5
    assert "against  onnxruntime" in cli.succeeds(*bench).out

    # The bundle works without the project, and another model is not taken for its own.
    save_model(cli.here / "other.onnx", seed=1)
    (cli.here / "edgesdk.toml").unlink()
    said = cli.succeeds("verify", "bundles/net-local")
    assert "only the golden inputs were compared" in said.err
    for command in ("verify", "bench"):
        options = ["--against", "onnxruntime"] if command == "bench" else []
        said = cli(command, "bundles/net-local", "--model", "other.onnx", *options)
        assert said.code == 2 and "is not the model" in said.err


def test_the_same_in_python(cli: Cli) -> None:
    model = save_model(cli.here / "net.onnx")
    shape = (1, 3, 8, 8)
    bundle = edgesdk.compile(model, shapes={"in:0": shape}, output="out")
    x = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
    outputs = edgesdk.run(bundle, {"in:0": x})
    assert list(outputs) == ["out.0"]
    np.testing.assert_allclose(outputs["out.0"], reference(model, x), rtol=1e-4, atol=1e-5)
    # Memory order and byte order are no part of a value.
    for same in (np.asfortranarray(x), x.astype(">f4")):
        np.testing.assert_array_equal(edgesdk.run("out", {"in:0": same})["out.0"], outputs["out.0"])
    with pytest.raises(UsageError, match="float64 1x3x8x8, not float32 1x3x8x8"):
        edgesdk.run(bundle, {"in:0": x.astype(np.float64)})
    with pytest.raises(UsageError, match="has no input 'in'"):
        edgesdk.run(bundle, {"in": x})
    assert edgesdk.verify(bundle, model=model, seeds=1).checks[1].name == "drawn inputs 1"
    assert edgesdk.bench(bundle, repeat=3).latency.runs == 3


def reference(model: Path, x: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    return session.run(None, {"in:0": x})[0]


def built_kernels(folder: Path) -> int:
    return int(edgesdk.open_bundle(folder).manifest.build["kernel_calls"])
