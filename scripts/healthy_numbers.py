"""Print the table of docs/healthy.md: the offsets, scores and risks of healthy recorded runs.

python -P scripts/healthy_numbers.py; it takes a minute.
"""

from pathlib import Path
from typing import Final

import numpy as np

from foreshock.contract import wire
from foreshock.contract.metrics import catalog
from foreshock.lab.recording.replay import judged
from foreshock.lab.recording.trace import read_trace

TRACES: Final = Path(__file__).parents[1] / "src/foreshock/lab/traces"
SETS: Final = {
    "small GPT, byte pairs": "real-text/text-gpt_*",
    "small Llama, byte pairs": "real-text/text-llama_*",
    "GPT, long": "real-text/long-gpt_*",
    "Llama, long": "real-text/long-llama_*",
    "Llama of eight layers": "real-text/llama-small*",
    "GPT-2 small": "real-text/gpt2-small_*",
    "GPT-2 small without biases": "real-text/gpt2-small-no-bias_*",
}
KEYS: Final = ("head.score_offset", "head.score_max")
FIRST: Final = 500
"""Earlier steps are left out: scores of a new model grow from zero."""


def main() -> None:
    """A line for each set: medians over heads and samples, and the 99th percentile in brackets."""
    print("| model | layers x heads | runs | offset, nats | largest score, nats | risk |\n|---|---|---|---|---|---|")
    for name, pattern in SETS.items():
        values: dict[str, list[float]] = {key: [] for key in (*KEYS, "risk")}
        paths = sorted(path for path in TRACES.glob(pattern) if "_untreated_" in path.name)
        for path in paths:
            trace = read_trace(path)
            for event in judged(trace):
                if isinstance(event, wire.Sample) and event.step >= FIRST and (words := event.words()) is not None:
                    for key in KEYS:
                        values[key] += np.abs(catalog.read(key, words)).tolist()
                    values["risk"] += [] if event.risk is None else event.risk.numpy().tolist()
        layers = len({layer for layer, _ in trace.heads})
        cells = [f"{name} | {layers} x {len(trace.heads) // layers} | {len(paths)}"]
        for key in (*KEYS, "risk"):
            digits = 2 if key == "risk" else 1
            median, most = np.nanpercentile(values[key], (50, 99))
            cells.append(f"{median:.{digits}f} ({most:.{digits}f})")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
