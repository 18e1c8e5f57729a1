"""tune: from a model and a device to records, a report and a bundle that uses them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgesdk import console
from edgesdk.cli.build import plan_works
from edgesdk.cli.options import (
    AllowTf32,
    AsJson,
    Device,
    ModelArgument,
    Precision,
    Shapes,
    Target,
    chosen_precision,
    parse_shapes,
    project_of,
)
from edgesdk.errors import UsageError

if TYPE_CHECKING:
    from edgesdk.tuning.session import TuneResult

_INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(tune)


def tune(
    model: ModelArgument = None,
    target: Target = None,
    device: Device = None,
    shape: Shapes = None,
    precision: Precision = None,
    allow_tf32: AllowTf32 = False,
    trials: Annotated[
        int | None, typer.Option("--trials", metavar="N", help="Measure at most N candidates.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", metavar="M", help="Search for M minutes (default: 10)."),
    ] = None,
    tuner: Annotated[
        str,
        typer.Option("--tuner", metavar="T", help="evolutionary, random, grid or replay."),
    ] = "evolutionary",
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the search.")] = 0,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--fresh", help="Use what is recorded already, or measure everything anew."
        ),
    ] = True,
    repeat: Annotated[
        int, typer.Option("--repeat", metavar="N", help="Samples of each candidate.")
    ] = 5,
    min_repeat_ms: Annotated[
        float, typer.Option("--min-repeat-ms", metavar="MS", help="Length of a sample.")
    ] = 20.0,
    flush_cache: Annotated[
        bool, typer.Option("--flush-cache", help="Empty the caches before each call.")
    ] = False,
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", help="Threads; 0: all CPUs of the device.")
    ] = 0,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="For a candidate on the device.")
    ] = 20.0,
    memory_limit: Annotated[
        int, typer.Option("--memory-limit", metavar="MIB", help="The same for its memory.")
    ] = 1024,
    build_timeout: Annotated[
        float, typer.Option("--build-timeout", metavar="S", help="For the build of a candidate.")
    ] = 60.0,
    build_memory: Annotated[
        int, typer.Option("--build-memory", metavar="MIB", help="The same for its memory.")
    ] = 4096,
    min_valid: Annotated[
        float,
        typer.Option(
            "--min-valid", metavar="SHARE", help="Fail if a smaller share can be measured."
        ),
    ] = 0.5,
    tracker: Annotated[
        str | None,
        typer.Option(
            "--tracker",
            metavar="HOST:PORT",
            help="Measure behind TVM's RPC tracker instead of on a device of the list.",
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", metavar="K", help="The device's key at the tracker.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="DIR", help="The bundle; default: bundles/<model>-<target>."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE", help="The HTML report; default: <bundle>.tuning.html."
        ),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option("--records", metavar="FILE", help="Another database of tuning records."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Search for the fastest code of each layer on the device itself.

    Every trial is recorded as it is measured: a session that ends in the middle goes on where it
    stopped. The bundle that is written uses what was found, unless it is not faster. Ctrl-C ends
    the search and writes the bundle of the best so far.
    """
    from edgesdk import api
    from edgesdk.deploy.connected import serving_device
    from edgesdk.devices import LOCAL_NAME
    from edgesdk.profiles import target_families
    from edgesdk.tuning.live import LiveTable
    from edgesdk.tuning.options import TuneOptions

    if tracker is not None and device is not None:
        raise UsageError("--device and --tracker name two devices", hint="leave one of them out")
    options = TuneOptions(
        trials=trials,
        minutes=minutes,
        tuner=tuner,
        seed=seed,
        resume=resume,
        min_valid_share=min_valid,
        repeat=repeat,
        min_repeat_ms=min_repeat_ms,
        flush_cache=flush_cache,
        threads=threads,
        timeout_s=timeout,
        memory_limit_mib=memory_limit,
        build_timeout_s=build_timeout,
        build_memory_mib=build_memory,
    )
    precision = chosen_precision(precision, allow_tf32)
    works = plan_works(model, target, parse_shapes(shape), precision, output)
    if report is not None and len(works) > 1:
        raise UsageError(
            f"--report names one file, and the project has {len(works)} targets",
            hint=f"add --target {works[0].title}",
        )
    project = project_of(model)
    if any(work.batches for work in works) and output is None:
        raise UsageError(
            "the project compiles several batches, and tune searches for one shape",
            hint="add -o DIR and the shape to search for; compile then uses what was found",
        )
    results = []
    interrupted = False
    for work in works:
        table = project.targets.get(work.name) if project else None
        chosen = device or (table.device if table else None)
        if chosen is None:
            family = work.profile in target_families() and tracker is None
            chosen = serving_device(work.profile) if family else LOCAL_NAME
        with LiveTable() as live:
            result = api.tune(
                work.model,
                target=work.profile,
                device=chosen,
                shapes=work.shapes,
                precision=work.precision,
                output=work.output,
                tracker=tracker,
                key=key,
                report=report,
                records=records,
                show=live.update,
                options=options,
            )
        results.append(_result(result))
        if not as_json:
            print(_text(result), flush=True)
        interrupted = result.state.phase == "interrupted"
        if interrupted:
            break
    if as_json:
        console.print_json({"sessions": results})
    if interrupted:
        raise typer.Exit(_INTERRUPTED)


def _result(result: TuneResult) -> dict[str, Any]:
    state = result.state
    final = state.final
    return {
        "bundle": result.bundle.path.absolute(),
        "report": result.report.absolute(),
        "target": state.target,
        "device": state.device,
        "phase": state.phase,
        "trials": state.trials,
        "errors": state.errors,
        "final": asdict(final) | {"gain": final.gain} if final else None,
        "coverage": result.bundle.manifest.build.get("coverage"),
        "tasks": [
            {k: v for k, v in asdict(task).items() if k != "schedule"} for task in state.tasks
        ],
    }


def _text(result: TuneResult) -> str:
    from edgesdk.tuning.live import errors_text, summary_texts

    state = result.state
    facts = [("bundle", str(result.bundle.path)), ("trials", str(state.trials))]
    if errors_text(state.errors):
        facts.append(("failed", errors_text(state.errors).partition(": ")[2]))
    if state.final is None:
        facts.append(("latency", "as before: no schedule beats the default ones"))
    else:
        facts.append(("latency", summary_texts(state)[0].removeprefix("latency ")))
    rungs = result.bundle.manifest.build["coverage"]["rungs"]
    served = ", ".join(f"{len(kernels)} {rung}" for rung, kernels in rungs.items())
    facts.append(("kernels", served or "none"))
    facts.append(("report", str(result.report)))
    return console.facts(facts)
