"""A training that is mirrored to a real tracker: `python -P tracked_run.py TRACKER FOLDER`.

Runs as a separate process, because the trackers' clients start services and threads that live as long as the process.
Prints the stored values as JSON, a list of [step, value] per name, and the agent's faults.
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

from tests.monitor import watched_training
from tests.monitor.doubles import ScriptedDetectors, verdict
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.tiny_models import tiny_gpt

from foreshock.monitor import AgentConfig, attach

STEPS = 6
AgentConfig.close_seconds = 60
Stored = dict[str, list[tuple[int, float]]]


def train(mirror: str, log: Callable[[float, int], None]) -> dict[str, int]:
    """A warning about layer 1 head 2 is raised at step 3 and cleared at step 5; the program logs its own loss."""
    model = tiny_gpt()
    with attach(model, **EVERY_STEP | {"attention": "keep", "strict": False}, mirror=mirror) as agent:
        script = {3: [verdict(1, 2, step=3)], 5: [verdict(1, 2, step=5, state="cleared")]}
        agent.detectors = ScriptedDetectors(len(agent.modes()), script)
        for step in range(STEPS):
            [loss] = watched_training.train(agent, model, [step])
            log(float(loss), step)
    return dict(agent.faults)


def with_mlflow(folder: Path) -> tuple[Stored, dict[str, int]]:
    os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    import mlflow

    mlflow.set_tracking_uri((folder / "mlruns").as_uri())  # the client creates the store
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
    for row in history_rows(file):
        for name in row.keys() - {"_step", "_runtime", "_timestamp", "foreshock/step"}:
            stored[name].append((int(row["foreshock/step" if "/" in name else "_step"]), row[name]))
    return stored, faults


def history_rows(file: Path) -> Iterator[dict[str, float]]:
    """The rows of an offline run. Waits until the file is complete, because `finish` may return earlier."""
    until = time.monotonic() + 240
    while not (found := list(records(file))) or found[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < until, f"the file was incomplete after 240 seconds, with {len(found)} records"
        time.sleep(0.1)
    for record in found:
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def records(file: Path) -> Iterator[Any]:
    """The records in a wandb file so far: after a header of 7 bytes, each has a checksum, a length and a type."""
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    assert len(data) < 2**15, "larger files may split records"
    at = 7
    while at + 7 <= len(data):
        _, size, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1, "an unsplit record"
        if at + 7 + size > len(data):
            return  # still being written
        yield wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + size])
        at += 7 + size


if __name__ == "__main__":
    stored, faults = {"mlflow": with_mlflow, "wandb": with_wandb}[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps({"stored": stored, "faults": faults}))
