"""`edgesdk tune` when something breaks around it: the records."""

from __future__ import annotations

from command_line import Cli
from tuning_place import save_network


def test_damaged_records_end_a_session_before_it_begins(cli: Cli) -> None:
    save_network(cli.here / "net.onnx", channels=(8, 16), size=8)
    damaged = cli.here / "damaged.db"
    content = b"no database at all, " * 500
    damaged.write_bytes(content)
    said = cli("tune", "net.onnx", "--target", "local", "--trials", "4", "--records", str(damaged))
    assert said.code == 3
    assert "damaged" in said.err and f"mv {damaged}" in said.err
    assert "Traceback" not in said.err
    assert damaged.read_bytes() == content
    assert not (cli.here / "bundles").exists()
