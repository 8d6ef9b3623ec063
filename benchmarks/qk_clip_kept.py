"""What QK-Clip's pass over all rows of a kept attention costs: `python -P -m foreshock.benchmarks.qk_clip_kept`.

Layers as wide as GPT-2 small's train in float32 on the CPU with attention kept, and every other step looks at all rows.
No score passes the threshold. Seconds are processor time of the whole process, so that a busy machine does not count.
"""

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from foreshock.benchmarks.agent_models import SHAPES, Model, Shape
from foreshock.monitor import attach


def measure(shape: Shape, pairs: int) -> tuple[float, float]:
    """Median seconds of a step, and what a step that looks at all rows takes more, as the median over pairs."""
    torch.manual_seed(0)
    model = Model(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    taken = []
    clip: dict[str, Any] = {"qk_clip": "always", "qk_clip_every_steps": 2, "qk_clip_threshold": 1e9}
    rare: dict[str, Any] = {"sample_every_steps": 10**6, "norms_every_steps": 0}
    with attach(model, attention="keep", quiet=True, strict=True, url=None, **clip, **rare) as agent:
        for _ in range(2 * pairs + 2):
            ids = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1))
            began = time.process_time()
            optimizer.zero_grad()
            loss = model(ids)
            loss.backward()
            optimizer.step()
            agent.step(loss.detach())
            taken.append(time.process_time() - began)
    plain, full = taken[2::2], taken[3::2]  # step 1 is the first, and the even ones look
    return statistics.median(plain), statistics.median(b - a for a, b in zip(plain, full, strict=True))


def main() -> None:
    """Print one line for each length."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--layers", type=int, default=1)
    options.add_argument("--tokens", type=int, default=1024, help="in a step")
    options.add_argument("--lengths", type=int, nargs="+", default=[256, 1024])
    options.add_argument("--pairs", type=int, default=5, help="steps of each kind")
    chosen = options.parse_args()
    for length in chosen.lengths:
        batch = max(1, chosen.tokens // length)
        shape = replace(SHAPES[0], layers=chosen.layers, length=length, batch=batch, vocabulary=512)
        step, more = measure(shape, chosen.pairs)
        print(f"length {length:5d}  step {1e3 * step:7.1f} ms  all rows +{1e3 * more:6.1f} ms  {more / step:6.1%}")


if __name__ == "__main__":
    main()
