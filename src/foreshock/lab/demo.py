"""`foreshock demo --train`: train a natural failure live, next to the same run with mitigation and without the cause.

The failure is not scripted or injected: the drift comes from the rounding of attention in bf16, the warning from the
detectors with their default settings, the switch from the agent's policy. Each training runs in its own process; the
live page shows them next to each other.
"""

import logging
import os
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from typing import Final, SupportsFloat

import torch
from rich.console import Console

from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.lab.shown.page import own_page
from foreshock.lab.training.recipes import Recipe, find_recipe
from foreshock.lab.training.run import Training, train
from foreshock.lab.training.variant import VARIANTS, Variant

SECONDS: Final = 300.0
"""Longest training time: a slow machine trains fewer steps, so that the demo does not take longer."""
RECIPE: Final = find_recipe("key-bias-small")
SEED: Final = 8
SHOWN: Final = {
    "baseline": VARIANTS["paper"],
    "rescued": VARIANTS["paper-rescued"],
    "no-key-bias": VARIANTS["paper-no-key-bias"],
}
"""Variants by the last part of their runs' names."""


def main(
    console: Console, *, seed: int | None = None, port: int = 8765, recipe: Recipe = RECIPE, seconds: float = SECONDS
) -> None:
    """Train all variants on the CPU at the same time, each for at most `seconds`.

    Raises OSError if the service does not start or a training fails.
    """
    seed, stamp = SEED if seed is None else seed, time.strftime("%H%M%S")
    runs = {f"demo-{stamp}-{name}": replace(variant, name=name) for name, variant in SHOWN.items()}
    with own_page(console, port, *runs) as url:
        console.print(
            f"One small GPT is trained three times from seed {seed}, on the same batches, for {seconds / 60:.0f} "
            "minutes at most. The agent of rescued may switch heads to "
            f"{DEFAULT_MITIGATION}; baseline is not switched; no-key-bias has no bias on its keys.\n\n"
            f"{recipe.summary} Unlike on a GPU, attention rounds as in the paper's reference, with scores, row sums "
            "and output in BF16. So it drifts sooner; with the rounding of GPU kernels the warning comes thousands of "
            "steps later.\n\n"
            "Watch the score offset: how far all scores of a head have moved together, in nats. Expect a "
            "warning, then a switch. Only one setting of the agent is not the default: it counts every row, every "
            f"{recipe.sample_every_steps} steps, instead of a sample of rows.",
            highlight=False,
        )
        context = get_context("spawn")  # after a fork, PyTorch may hang in its thread pool
        workers = {
            run: context.Process(target=_train, args=(recipe, variant, seed, run, url, seconds), daemon=True)
            for run, variant in runs.items()
        }
        for worker in workers.values():
            worker.start()
        for worker in workers.values():
            worker.join()
        if failed := [run for run, worker in workers.items() if worker.exitcode]:
            raise ChildProcessError(f"{', '.join(failed)} failed; see the errors above")
        console.print("All three have ended. Recorded failures, which take thousands of steps more: foreshock demo")


def _train(recipe: Recipe, variant: Variant, seed: int, run: str, url: str, seconds: float) -> None:
    """Run one training in its own process; its log lines begin with the name of its variant."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    logging.basicConfig(format=f"{variant.name}: %(message)s")
    ends_at = time.monotonic() + seconds
    with suppress(KeyboardInterrupt):
        training = Training(recipe, variant, seed, run=run, url=url)

        def stepped(step: int, loss: SupportsFloat) -> None:
            training.wants_to_end = time.monotonic() > ends_at

        train(training, recipe.steps, stepped)
