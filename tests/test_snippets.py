"""Every Python block in the documentation runs unchanged."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from tests.monitor import titan_shape
from tests.monitor.tiny_models import tiny_gpt, train_step
from tests.monitor.trainers import Tokens, gpt2

import foreshock
from foreshock.callbacks import TransformersCallback
from foreshock.monitor.agent import Agent

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
STEPS_AGENT: Final = re.compile(r"agent\.step\(|Callback\(run|Tracker\(|watch_torchtitan\(")


def blocks() -> Iterator[Any]:
    """(page, text) of every Python block."""
    for page in PAGES:
        found = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        for number, text in enumerate(found):
            yield pytest.param(page, text, id=f"{page.relative_to(ROOT)}:{number}")


class Module(LightningModule):  # type: ignore[misc]
    """A Lightning model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = gpt2()

    def training_step(self, inputs: dict[str, torch.Tensor], *_: Any) -> Any:
        return self.net(**inputs).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def names_for(text: str, folder: Path) -> dict[str, Any]:
    """Names that a block uses without defining them, as small models and data for the block's trainer."""
    sequences = torch.utils.data.Subset(Tokens(named=True), range(4))
    data: Any = torch.utils.data.DataLoader(sequences, batch_size=2)
    if "transformers" in text or "TransformersCallback" in text:
        quiet: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
        args = transformers.TrainingArguments(output_dir=str(folder), max_steps=2, **quiet)
        imported = {} if "import" in text else {"TransformersCallback": TransformersCallback}
        trainer_names = {"Trainer": transformers.Trainer, "transformers": transformers, "model": gpt2(), "args": args}
        return {**trainer_names, **imported, "data": sequences}
    if "LightningCallback" in text:
        quiet_settings = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}

        def trainer(**given: Any) -> Any:
            return LightningTrainer(accelerator="cpu", max_steps=2, logger=False, **quiet_settings, **given)

        return {"Trainer": trainer, "module": Module(), "data": data}
    if "watch_torchtitan" in text:
        return {"trainer": titan_shape.Trainer(3, folder)}
    if "def build" in text:
        return {"MyModel": gpt2, "my_loader": lambda: data, "torch": torch}
    accelerated = "AccelerateTracker" in text
    model: Any = gpt2() if accelerated else tiny_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, Any] = {"Accelerator": lambda **given: Accelerator(cpu=True, **given), "data": data}
    if not accelerated:
        loss = train_step(model, optimizer, 0).detach()
        names = {"batches": range(3), "data": range(3), "loss": loss, "norm": 1.0, "rate": 0.1}
        names |= {"train_step": lambda model, number: train_step(model, optimizer, number).detach()}
    return {"model": model, "optimizer": optimizer, **names}


@pytest.mark.parametrize(("page", "text"), [*blocks()])
@pytest.mark.filterwarnings("ignore")  # from the trainers, and from torch.autocast without a device
def test_python_block_runs_and_steps_the_agent_if_it_attaches(
    page: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(foreshock.AgentConfig, "close_seconds", 0.1)
    steps: list[int] = []
    step = Agent.step

    def counted_step(agent: Agent, *args: Any, **kwargs: Any) -> Any:
        steps.append(1)
        return step(agent, *args, **kwargs)

    monkeypatch.setattr(Agent, "step", counted_step)
    names = {"foreshock": foreshock, **names_for(text, tmp_path)}
    if "agent." in text and "foreshock.attach" not in text and "watch.agent" not in text:
        names |= {"agent": foreshock.attach(names["model"], run="my-run"), "checkpoint": {}}
    try:
        exec(compile(text, str(page), "exec"), names)
        if "def build" in text:
            assert torch.isfinite(names["build"]()[1]())
    finally:
        if (agent := names.get("agent")) is not None:
            agent.close("completed")
        if "watch_torchtitan" in text:  # torchtitan's main closes the trainer
            names["trainer"].close()
    assert bool(steps) == bool(STEPS_AGENT.search(text)), "a block that attaches the agent must also step it"
