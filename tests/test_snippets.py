"""Every Python block of the documentation runs as it stands."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from tests.monitor.tiny_models import tiny_gpt, train_step
from tests.monitor.titan_shape import Trainer
from torch import nn

from foreshock.monitor.agent import Agent

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WATCHES: Final = re.compile(r"agent\.step\(|Callback\(run|Tracker\(|watch_torchtitan\(")


def blocks() -> Iterator[Any]:
    """(page, block) of every block of Python."""
    for page in PAGES:
        found = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        for number, text in enumerate(found):
            yield pytest.param(page, text, id=f"{page.relative_to(ROOT)}:{number}")


# What a reader has already: small stand-ins for the names that blocks use without making them.


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Four sequences of tokens, as a Trainer takes them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(12) + index
        return {"input_ids": tokens, "labels": tokens}


class MyModel(transformers.GPT2LMHeadModel):  # type: ignore[misc]
    """A GPT-2 of one layer, which stays on the processor."""

    def __init__(self) -> None:
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        super().__init__(transformers.GPT2Config(vocab_size=48, n_positions=16, n_embd=16, n_layer=1, n_head=2, **none))

    def to(self, *_: Any, **__: Any) -> "MyModel":
        return self


def my_loader() -> torch.utils.data.DataLoader[dict[str, torch.Tensor]]:
    return torch.utils.data.DataLoader(Sequences(), batch_size=2)


def of_own_loops() -> dict[str, Any]:
    model = tiny_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = train_step(model, optimizer, 0)
    numbers = {"loss": loss.detach(), "norm": 1.0, "rate": 0.1}
    return {
        "model": model,
        "optimizer": optimizer,
        "batches": range(3),
        "data": range(3),
        "train_step": lambda model, number: train_step(model, optimizer, number).detach(),
        **numbers,
    }


def of_transformers(folder: Path) -> dict[str, Any]:
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    return {
        "Trainer": transformers.Trainer,
        "transformers": transformers,
        "model": MyModel(),
        "args": args,
        "data": Sequences(),
    }


def of_lightning() -> dict[str, Any]:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = MyModel()

        def training_step(self, inputs: dict[str, torch.Tensor], *_: Any) -> Any:
            return self.net(**inputs).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trainer(**given: Any) -> Any:
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        return Trainer(accelerator="cpu", max_steps=2, logger=False, **quiet, **given)

    return {"Trainer": trainer, "module": Module(), "data": my_loader()}


def of_accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    model: nn.Module = MyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "Accelerator": lambda **given: Accelerator(cpu=True, **given),
        "model": model,
        "optimizer": optimizer,
        "data": my_loader(),
    }


def of_torchtitan(folder: Path) -> dict[str, Any]:
    return {"trainer": Trainer(3, folder)}


def names_for(text: str, folder: Path) -> dict[str, Any]:
    """The reader's own names, by the trainer that a block is written for."""
    if "transformers" in text or "TransformersCallback" in text:
        return of_transformers(folder)
    if "LightningCallback" in text:
        return of_lightning()
    if "AccelerateTracker" in text:
        return of_accelerate()
    if "watch_torchtitan" in text:
        return of_torchtitan(folder)
    if "def build" in text:
        return {"MyModel": MyModel, "my_loader": my_loader, "torch": torch}
    return of_own_loops()


@pytest.mark.parametrize(("page", "text"), [*blocks()])
@pytest.mark.filterwarnings("ignore")  # those of the trainers and of torch.autocast without its device
def test_a_python_block_runs_as_it_stands_and_watches_what_it_says(
    page: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import foreshock

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(foreshock.AgentConfig, "close_seconds", 0.1)
    steps: list[int] = []
    step = Agent.step

    def counted(agent: Agent, *args: Any, **kwargs: Any) -> Any:
        steps.append(1)
        return step(agent, *args, **kwargs)

    monkeypatch.setattr(Agent, "step", counted)
    names = {"foreshock": foreshock, **names_for(text, tmp_path)}
    if "TransformersCallback(" in text and "import" not in text:
        from foreshock.callbacks import TransformersCallback

        names["TransformersCallback"] = TransformersCallback
    if "agent." in text and "foreshock.attach" not in text and "watch.agent" not in text:
        names |= {"agent": foreshock.attach(names["model"], run="my-run"), "checkpoint": {}}
    try:
        exec(compile(text, str(page), "exec"), names)
        if "def build" in text:
            made = names["build"]()
            assert torch.isfinite(made[1]())
    finally:
        if (agent := names.get("agent")) is not None:
            agent.close("completed")
        if "watch_torchtitan" in text:  # torchtitan's own main closes it
            names["trainer"].close()
    assert bool(steps) == bool(WATCHES.search(text)), "a block that attaches to a training watches its steps"
