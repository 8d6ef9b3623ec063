"""`foreshock bench`: each command runs one benchmark."""

from pathlib import Path
from typing import Annotated

import typer

from foreshock.cli.errors import Commands

bench = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Benchmarks of the kernels, the agent, the detectors and the service; in a checkout only.",
)

Json = Annotated[Path | None, typer.Option(help="File to write every number to.")]


@bench.command("attention")
def bench_attention(
    json: Json = None,
    repeats: Annotated[int, typer.Option(help="Number of timed rounds.", min=3)] = 15,
    modes: Annotated[
        bool,
        typer.Option(
            "--modes", help="Only the cost of each mode compared with plain heads and cuDNN, on eight shapes."
        ),
    ] = False,
) -> None:
    """Time attention next to SDPA flash and SDPA cuDNN, interleaved in one process. Needs a CUDA GPU."""
    from foreshock.benchmarks import attention

    attention.main(json, repeats, modes=modes)


@bench.command("agent")
def bench_agent(
    json: Json = None,
    rounds: Annotated[
        int, typer.Option(help="Number of blocks of steps that each variant trains, in turn.", min=1)
    ] = 12,
    shape: Annotated[
        str | None,
        typer.Option(help="Model to time: gpt2-small or llama-1b, by default both, or gpt2-mini, which runs on a CPU."),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="Variant to time: kernels_agent or keep_agent; may be repeated. By default both."),
    ] = None,
) -> None:
    """Time training steps without foreshock, with an agent and its kernels, and with an agent and native attention.

    All shapes but gpt2-mini need a CUDA GPU.
    """
    from foreshock.benchmarks import agent_step

    agent_step.main(json, rounds, shape, variant or agent_step.WATCHED)


@bench.command("detectors")
def bench_detectors(
    json: Json = None,
    passes: Annotated[int, typer.Option(help="Number of times that each course is played.", min=1)] = 12,
) -> None:
    """Time the detectors of 80 layers of 64 heads, healthy and with a layer that drifts. Set OMP_NUM_THREADS=1."""
    from foreshock.benchmarks import detectors

    detectors.main(json, passes)


@bench.command("ingest")
def bench_ingest(
    json: Json = None,
    seconds: Annotated[float, typer.Option(help="Length of each phase in seconds.", min=1.0)] = 20.0,
    database_url: Annotated[
        str | None,
        typer.Option(help="Address of a PostgreSQL database that may be overwritten; by default SQLite is used."),
    ] = None,
) -> None:
    """Load a real service over loopback: at its capacity, and with ten times the clients."""
    from foreshock.benchmarks import ingest

    ingest.main(json, seconds=seconds, database_url=database_url)


@bench.command("service")
def bench_service(
    json: Json = None,
) -> None:
    """Measure curves and /metrics at scale, ingest of 256 ranks, memory, and the size of the database."""
    from foreshock.benchmarks import service

    service.main(json)


@bench.command("page")
def bench_page(
    json: Json = None,
    repeats: Annotated[int, typer.Option(help="Number of times that the page is opened.", min=1)] = 7,
) -> None:
    """Time the page of a run of 1,000,000 steps of 80 layers of 64 heads in a real Chromium, to its last chart."""
    from foreshock.benchmarks import page

    page.main(json, repeats=repeats)
