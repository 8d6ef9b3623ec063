"""A training whose tracker is a real one, told by its own client library: `python -P tracked_run.py TRACKER FOLDER`.

In a process of its own, since these clients start services and threads that live as long as their process. Prints as
JSON what the tracker has stored, one list of [step, value] for each name, and the agent's faults.
"""

import json
import os
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.monitor import watching
from tests.monitor.doubles import ScriptedDetectors, verdict
from tests.monitor.executions import EVERY_STEP
from tests.monitor.tiny_models import tiny_gpt

from foreshock.monitor import AgentConfig, attach

STEPS = 6
AgentConfig.close_seconds = 60
Stored = dict[str, list[tuple[int, float]]]


def train(mirror: str, log: Callable[[float, int], None]) -> dict[str, int]:
    """Layer 1 head 2 is warned about at step 3 and cleared at step 5; the program logs its own loss meanwhile."""
    model = tiny_gpt()
    with attach(model, **EVERY_STEP | {"attention": "keep", "strict": False}, mirror=mirror) as agent:
        script = {3: [verdict(1, 2, step=3)], 5: [verdict(1, 2, step=5, state="cleared")]}
        agent.detectors = ScriptedDetectors(len(agent.modes()), script)
        for step in range(STEPS):
            [loss] = watching.train(agent, model, [step])
            log(float(loss), step)
    return dict(agent.faults)


def with_mlflow(folder: Path) -> tuple[Stored, dict[str, int]]:
    os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    import mlflow

    mlflow.set_tracking_uri((folder / "mlruns").as_uri())  # the client makes the store itself
    with mlflow.start_run() as run:
        faults = train("mlflow", lambda loss, step: mlflow.log_metric("loss", loss, step=step))
    client = mlflow.MlflowClient()
    data = client.get_run(run.info.run_id).data
    assert data.tags["foreshock.warning"].startswith("step 3: "), data.tags
    stored = {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        for name in data.metrics
    }
    return stored, faults


def with_wandb(folder: Path) -> tuple[Stored, dict[str, int]]:
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true", "HOME": str(folder)}
    os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB__SERVICE_WAIT": "300"}
    import wandb

    run = wandb.init(project="tests", settings=wandb.Settings(init_timeout=300))
    faults = train("wandb", lambda loss, step: run.log({"loss": loss}))
    wandb.finish()
    (file,) = folder.rglob("*.wandb")
    stored: Stored = defaultdict(list)
    for row in histories(file):
        for name in row.keys() - {"_step", "_runtime", "_timestamp", "foreshock/step"}:
            stored[name].append((int(row["foreshock/step" if "/" in name else "_step"]), row[name]))
    return stored, faults


def histories(file: Path) -> Iterator[dict[str, float]]:
    """The rows of a run that was recorded offline, once its record is whole: `finish` may return before it is."""
    until = time.monotonic() + 240
    while not (found := list(records(file))) or found[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < until, f"no end of the record in 240 seconds, after {len(found)} of its parts"
        time.sleep(0.1)
    for record in found:
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def records(file: Path) -> Iterator[Any]:
    """What a record of wandb holds so far: a header of 7 bytes, then parts of checksum, length and kind."""
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    assert len(data) < 2**15, "records may be split from here on"
    at = 7
    while at + 7 <= len(data):
        _, size, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1, "a whole record"
        if at + 7 + size > len(data):
            return  # still being written
        yield wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + size])
        at += 7 + size


if __name__ == "__main__":
    stored, faults = {"mlflow": with_mlflow, "wandb": with_wandb}[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps({"stored": stored, "faults": faults}))
