"""Read a recorded loss explosion and find the head that caused it: what was warned about, when, and what moved.

python examples/read_explosion.py            # src/foreshock/lab/traces, in a checkout
python examples/read_explosion.py TRACE.jsonl.gz
"""

import argparse
from pathlib import Path

import numpy as np

from foreshock.contract.metrics import catalog
from foreshock.lab.recording.replay import verdicts
from foreshock.lab.recording.trace import read_trace

RECORDED = Path(__file__).parents[1] / "src/foreshock/lab/traces/cure/shared-values_untreated_seed2.trace.xz"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("trace", nargs="?", type=Path, default=RECORDED)
    trace = read_trace(options.parse_args().trace)

    # the loss: when did everybody see it?
    losses = [(sample.step, sample.loss) for sample in trace.samples if sample.loss is not None]
    lowest = float("inf")
    for step, loss in losses:
        if loss > 1.5 * lowest:
            print(f"step {step}: the loss is {loss:.2f}, after a lowest of {lowest:.2f}")
            break
        lowest = min(lowest, loss)

    # the detectors, as they are today, over the recorded samples
    warning = next(v for v in verdicts(trace) if v.state == "raised" and v.layer is not None)
    print(f"step {warning.step}: {warning.sentence}")

    # the score offset of every head, [samples, heads]: which one grew most from there on?
    samples = [(sample.step, words) for sample in trace.samples if (words := sample.words()) is not None]
    steps = np.array([step for step, _ in samples])
    offsets = np.abs([catalog.read("head.score_offset", words) for _, words in samples])
    later = 2 * warning.step
    before, after = (offsets[np.searchsorted(steps, at)] for at in (warning.step, later))
    for index in np.argsort(-after / before)[:3]:
        layer, head = trace.heads[index]
        moved = f"{before[index]:.1f} nats at the warning, {after[index]:.0f} at step {later}"
        print(f"layer {layer} head {head}: score offset {moved}")


if __name__ == "__main__":
    main()
