"""`foreshock demo --train`: one natural failure, live, beside the same run rescued and the same without its cause.

Nothing is scripted or injected: the drift comes from the rounding of attention in bf16, the warning from the shipped
detectors with their shipped settings, the switch from the agent's own policy. Each training is a process of its own;
the live page shows them side by side.
"""

import logging
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import torch
from rich.console import Console

from foreshock.contract.incident import page_of
from foreshock.lab.training.recipes import Recipe, find_recipe
from foreshock.lab.training.run import Training, train
from foreshock.lab.training.variant import (
    CONTROL,
    PAPER,
    PAPER_NO_KEY_BIAS,
    PAPER_RESCUED,
    RESCUED,
    UNTREATED,
    Variant,
    shown_name,
)
from foreshock.server.child import ServiceProcess

SECONDS: Final = 300.0
"""Most that the training takes; a slow machine then shows fewer steps instead of a longer demo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """One failure beside what would have been without it."""

    recipe: Recipe
    seed: int
    """Of weights and batches, unless another is named."""
    variants: tuple[Variant, ...]
    says: str
    """What is not as in most people's training, and what the last variant leaves out."""


ON_CPU: Final = Show(
    recipe=find_recipe("key-bias-small"),
    seed=8,
    variants=tuple(
        replace(variant, name=name)
        for variant, name in (
            (PAPER, UNTREATED.name),
            (PAPER_RESCUED, RESCUED.name),
            (PAPER_NO_KEY_BIAS, "no-key-bias"),
        )
    ),
    says="One thing is as on no GPU: attention rounds as in the paper's reference, where scores, row sums and output "
    "are in BF16. It drifts sooner so; with the rounding of GPU kernels the warning comes thousands of steps later. "
    "no-key-bias rounds the same, and has no bias on its keys.",
)
"""Anywhere."""
ON_GPU: Final = Show(
    recipe=find_recipe("shared-values"),
    seed=2,
    variants=(UNTREATED, RESCUED, CONTROL),
    says="It starts from values that share a large part; of three seeds one explodes: 2, which is shown. control has "
    "attention in float32.",
)
"""Where there is a GPU."""


def main(
    console: Console, *, seed: int | None = None, port: int = 8765, show: Show | None = None, seconds: float = SECONDS
) -> None:
    """Train all variants of `show` (by default the GPU's, or the CPU's where there is none), each for `seconds`.

    Raises OSError when the service does not start, and when a training fails.
    """
    show = show or (ON_GPU if torch.cuda.is_available() else ON_CPU)
    seed, stamp = show.seed if seed is None else seed, time.strftime("%H%M%S")
    runs = [f"demo-{stamp}-{shown_name(variant.name)}" for variant in show.variants]
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="foreshock-demo-"))
        url = stack.enter_context(ServiceProcess(Path(directory), {"FORESHOCK_PORT": str(port)})).url
        page = page_of(url, *runs)
        console.print(
            f"One small GPT is trained three times from seed {seed}, on the same batches, for {seconds / 60:.0f} "
            f"minutes at most. baseline is left alone; the agent of rescued may switch, to {RESCUED.mitigation}.\n\n"
            f"{show.recipe.summary} {show.says}\n\nWatch the score offset: how far all scores of a head have moved "
            "together, in nats. A warning, then a switch, should come; detectors and switch are as shipped. One "
            f"setting of the agent is not: it counts every row, every {show.recipe.sample_every_steps} steps, where by "
            "default it measures a sample of them.",
            highlight=False,
        )
        console.print(f"\nLive page: [link={page}]{page}[/link]\n", soft_wrap=True)
        context = get_context("spawn")  # a forked torch may hang on its thread pool
        given = [
            (show.recipe, variant, seed, run, url, seconds) for variant, run in zip(show.variants, runs, strict=True)
        ]
        workers = [context.Process(target=_train, args=each, daemon=True) for each in given]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failed := [run for run, worker in zip(runs, workers, strict=True) if worker.exitcode]:
            raise ChildProcessError(f"{', '.join(failed)} failed; what was printed stands above")
        console.print("All three have ended. Recorded failures, which take thousands of steps more: foreshock demo")
        if console.is_terminal and sys.stdin.isatty():
            console.input("The live page stays up until you press Enter. ")


def _train(recipe: Recipe, variant: Variant, seed: int, run: str, url: str, seconds: float) -> None:
    """One training, in a process of its own, which says which it is of what its agent logs."""
    torch.set_num_threads(1)
    logging.basicConfig(format=f"{shown_name(variant.name)}: %(message)s")
    with suppress(KeyboardInterrupt):
        training = Training(recipe, variant, seed, run=run, url=url)
        train(training, recipe.steps, deadline=time.monotonic() + seconds)
