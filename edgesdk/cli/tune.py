"""tune: from a model and a device to records, a report and a bundle that uses them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgesdk import console
from edgesdk.cli.build import plan_works
from edgesdk.cli.options import (
    AsJson,
    Device,
    ModelArgument,
    Shapes,
    Target,
    parse_shapes,
    project_of,
)

if TYPE_CHECKING:
    from edgesdk.tuning.session import TuneResult


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(tune)


def tune(
    model: ModelArgument = None,
    target: Target = None,
    device: Device = None,
    shape: Shapes = None,
    trials: Annotated[
        int | None, typer.Option("--trials", metavar="N", help="Measure at most N candidates.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", metavar="M", help="Search for M minutes (default: 10)."),
    ] = None,
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
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", help="Threads; 0: all CPUs of the device.")
    ] = 0,
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
    stopped. The bundle that is written uses what was found, unless it is not faster.
    """
    from edgesdk import api
    from edgesdk.tuning.live import LiveTable

    works = plan_works(model, target, parse_shapes(shape), None, output)
    project = project_of(model)
    results = []
    for work in works:
        options = project.targets.get(target or work.title) if project else None
        chosen = device or (options.device if options else None) or "local"
        with LiveTable() as live:
            result = api.tune(
                work.model,
                target=work.profile,
                device=chosen,
                shapes=work.shapes,
                output=work.output,
                trials=trials,
                minutes=minutes,
                seed=seed,
                resume=resume,
                repeat=repeat,
                min_repeat_ms=min_repeat_ms,
                threads=threads,
                report=report,
                records=records,
                show=live.update,
            )
        results.append(_result(result))
        if not as_json:
            print(_text(result), flush=True)
    if as_json:
        console.print_json({"sessions": results})


def _result(result: TuneResult) -> dict[str, Any]:
    state = result.state
    final = state.final
    return {
        "bundle": result.bundle.path.absolute(),
        "report": result.report.absolute() if result.report else None,
        "target": state.target,
        "device": state.device,
        "trials": state.trials,
        "errors": state.errors,
        "final": asdict(final) | {"gain": final.gain} if final else None,
        "coverage": result.bundle.manifest.build.get("coverage"),
        "tasks": [
            {k: v for k, v in asdict(task).items() if k != "schedule"} for task in state.tasks
        ],
    }


def _text(result: TuneResult) -> str:
    import statistics

    state, final = result.state, result.state.final
    facts = [("bundle", str(result.bundle.path)), ("trials", str(state.trials))]
    if state.errors:
        failed = ", ".join(f"{count} {kind}" for kind, count in state.errors.items())
        facts.append(("failed", failed))
    if final is not None:
        untuned = statistics.median(final.untuned_ms)
        tuned = statistics.median(final.tuned_ms)
        kept = "" if final.shipped else ": the untuned code is kept"
        facts.append(
            ("latency", f"{tuned:.3f} ms tuned, {untuned:.3f} ms untuned, {final.gain:.2f}x{kept}")
        )
    rungs = result.bundle.manifest.build["coverage"]["rungs"]
    served = ", ".join(f"{len(kernels)} {rung}" for rung, kernels in rungs.items())
    facts.append(("kernels", served or "none"))
    if result.report is not None:
        facts.append(("report", str(result.report)))
    return console.facts(facts)
