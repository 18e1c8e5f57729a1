"""Fixtures of more than one kind of test."""

from command_line import cli, fake_bundle

__all__ = ["cli", "fake_bundle"]
