"""The command line: one command per stage, parsing and printing only.

`main` is the one place where errors become two lines on stderr and an exit code. Nothing heavy is
imported before a command needs it: `edgesdk --help` answers in a moment.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.core

import edgesdk
from edgesdk import console
from edgesdk.cli import build, deploy, devices, quantize, records, tune
from edgesdk.errors import EdgeSdkError, UnsupportedModelError, UsageError, VerificationError

PROGRAM = "edgesdk"
DEBUG_VARIABLE = "EDGESDK_DEBUG"

_INTERRUPTED = 130
_BROKEN_PIPE = 141

# The base of what typer raises for arguments; its home differs between releases of typer.
_ArgumentError: type[Any] = typer.BadParameter.__bases__[0]

_EPILOG = (
    "Results go to stdout, all else to stderr. Exit codes: 1 unexpected, 2 usage, 3 profile or"
    " configuration, 4 local tool missing, 5 import, compile or tune failed, 6 device unreachable,"
    " 7 failed on the device, 8 result differs from the reference."
)

_ORDER = (
    "init",
    "targets",
    "devices",
    "doctor",
    "inspect",
    "quantize",
    "compile",
    "tune",
    "push",
    "rollback",
    "run",
    "bench",
    "verify",
    "records",
)


# What to look at after an error whose raiser knows nothing better, by exit code.
_NEXT = {
    3: "edgesdk doctor",
    4: "edgesdk doctor",
    5: "edgesdk inspect MODEL",
    6: "edgesdk devices",
    7: "edgesdk devices check NAME",
    8: "edgesdk verify BUNDLE",
}


class _Commands(typer.core.TyperGroup):
    """The commands in the order of the work, which typer would put by kind."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=_ORDER.index)


app = typer.Typer(
    name=PROGRAM,
    cls=_Commands,
    epilog=_EPILOG,
    invoke_without_command=True,
    # Rich help takes longer to import than everything else here together.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Compile trained networks for the board on the desk, bring them there, run them."""
    if version:
        print(f"{PROGRAM} {edgesdk.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


build.register(app)
quantize.register(app)
devices.register(app)
deploy.register(app)
records.register(app)
tune.register(app)


def main() -> None:
    """Runs the command line of this process and exits."""
    # Temporary folders and half-written bundles are removed on the way out, however it ends.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _quiet_broken_pipe()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns the exit code; nothing but SystemExit is raised."""
    as_json = "--json" in arguments
    try:
        root_command = typer.main.get_command(app)
        # Not its main(): that turns interrupts and broken pipes into its own messages.
        with root_command.make_context(PROGRAM, list(arguments)) as context:
            root_command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    except _ArgumentError as error:
        return _report(_usage_error(error), arguments, as_json=as_json)
    except EdgeSdkError as error:
        return _report(error, arguments, as_json=as_json)
    except KeyboardInterrupt:
        console.print_error("interrupted", None)
        return _INTERRUPTED
    except BrokenPipeError:
        return _quiet_broken_pipe()
    except Exception as error:
        return _report(_unexpected(error), arguments, as_json=as_json)
    return 0


def _report(error: EdgeSdkError, arguments: Sequence[str], *, as_json: bool) -> int:
    if os.environ.get(DEBUG_VARIABLE) == "1":
        import traceback

        traceback.print_exception(error)
    hint = error.hint or _NEXT.get(error.exit_code) or _help_of(arguments)
    if as_json:
        details: dict[str, Any] = {
            "kind": type(error).__name__,
            "message": console.one_line(error.message),
            "hint": console.one_line(hint),
            "exit_code": error.exit_code,
        }
        if isinstance(error, UnsupportedModelError):
            keys = ("node", "operator", "reason")
            details["nodes"] = [dict(zip(keys, node, strict=True)) for node in error.nodes]
        if isinstance(error, VerificationError) and error.layers:
            details["layers"] = error.layers
        console.print_json({"error": details})
    console.print_error(error.message, hint)
    return error.exit_code


def _help_of(arguments: Sequence[str]) -> str:
    """The command that explains the one that was typed."""
    words = [PROGRAM]
    command: Any = typer.main.get_command(app)
    for argument in arguments:
        inner = getattr(command, "commands", {}).get(argument)
        if inner is None:
            break
        words.append(argument)
        command = inner
    return " ".join([*words, "--help"])


def _usage_error(error: Any) -> UsageError:
    """typer's complaint in our form: one line, no full stop, and the next thing to type."""
    text = console.one_line(error.format_message())
    hint = None
    # Where typer has a suggestion it stands at the end of the message.
    found = re.search(r"\.? (Did you mean|\(Possible options:) (.*?)[?)]$", text)
    if found:
        text, hint = text[: found.start()], f"did you mean {found.group(2)}?"
    # typer's word for what a choice refuses.
    text = text.replace(": Value error, ", ": ").rstrip(".")
    return UsageError(text[:1].lower() + text[1:], hint=hint)


def _unexpected(error: Exception) -> EdgeSdkError:
    said = console.one_line(str(error))
    wrapped = EdgeSdkError(
        f"unexpected {type(error).__name__}" + (f": {said}" if said else ""),
        hint=f"{DEBUG_VARIABLE}=1 in front of the command shows where; please report it",
    )
    wrapped.__cause__ = error
    return wrapped


def _quiet_broken_pipe() -> int:
    # Whoever reads our output has gone; Python must not flush into it again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _BROKEN_PIPE
