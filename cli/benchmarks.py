"""`foreshock bench`: each command runs one benchmark."""

from pathlib import Path
from typing import Annotated

import typer

from foreshock.cli.errors import Commands

bench = typer.Typer(cls=Commands, no_args_is_help=True, help="Benchmarks, each with a peer in the same run.")


@bench.command("attention")
def bench_attention(
    json: Annotated[Path | None, typer.Option(help="Write every cell of the table.")] = None,
    repeats: Annotated[int, typer.Option(help="Rounds of the interleaved timings.", min=3)] = 15,
    host_only: Annotated[
        bool,
        typer.Option("--host-only", help="Only the host's time for a small call; without a GPU less the launches."),
    ] = False,
) -> None:
    """Time attention beside SDPA flash, SDPA cuDNN and FlexAttention, interleaved in one process. Needs a CUDA GPU."""
    from foreshock.benchmarks import attention, attention_host

    if host_only:
        attention_host.main(None if json is None else str(json))
        return
    attention.main(None if json is None else str(json), repeats)


@bench.command("spectral")
def bench_spectral(
    json: Annotated[Path | None, typer.Option(help="Write every figure.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed calls.", min=3)] = 9,
) -> None:
    """Time the spectral norms of 32 layers of 32 heads, d_model 4096, and check them. Needs a CUDA GPU."""
    from foreshock.benchmarks import spectral

    spectral.main(None if json is None else str(json), repeats)


@bench.command("detectors")
def bench_detectors(json: Annotated[Path | None, typer.Option(help="Write every figure.")] = None) -> None:
    """Time the detectors: 80 layers of 64 heads on one core, words to verdicts. Set OMP_NUM_THREADS=1."""
    from foreshock.benchmarks import detectors

    detectors.main(json)


@bench.command("agent")
def bench_agent(
    json: Annotated[Path | None, typer.Option(help="Write every figure.")] = None,
    rounds: Annotated[int, typer.Option(help="Blocks of steps that each variant trains, in turn.", min=1)] = 12,
    shape: Annotated[str | None, typer.Option(help="Only this one: gpt2-small or llama-1b.")] = None,
) -> None:
    """Time training steps: without foreshock, with its kernels, its agent, with attention kept. Needs a CUDA GPU."""
    from foreshock.benchmarks import agent_step

    agent_step.main(json, rounds, shape)


@bench.command("ingest")
def bench_ingest(
    json: Annotated[Path | None, typer.Option(help="Write every figure.")] = None,
    seconds: Annotated[float, typer.Option(help="Length of each phase.", min=1.0)] = 20.0,
    database_url: Annotated[
        str | None, typer.Option(help="A PostgreSQL database that may be written to; SQLite by default.")
    ] = None,
) -> None:
    """Drive a real service over loopback: batches a second, then ten times the clients, then what comes after."""
    from foreshock.benchmarks import ingest

    ingest.main(json, seconds=seconds, database_url=database_url)


@bench.command("service")
def bench_service(
    json: Annotated[Path | None, typer.Option(help="Write every figure.")] = None,
    database_url: Annotated[
        str | None,
        typer.Option(help="A PostgreSQL database that may be written to; then jobs start on 1 to 3 replicas."),
    ] = None,
) -> None:
    """Scrape 2,000 runs, tell 500 listeners, start 256 ranks at once on one, two and three replicas."""
    from foreshock.benchmarks import service_load

    service_load.main(json, database_url=database_url)


@bench.command("page")
def bench_page(
    json: Annotated[Path | None, typer.Option(help="Write every figure.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Keep the filled store here, 3 GB; found there, it is used again.")
    ] = None,
) -> None:
    """Draw runs of 600,000 steps in a real Chromium: queries, first paint, scrubbing through the heat map."""
    from foreshock.benchmarks import page

    page.main(json, folder=folder)
