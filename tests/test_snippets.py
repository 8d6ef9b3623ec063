"""Every Python block of the documentation runs as it stands, and every command line in a block is one that exists."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
import typer.main
from tests.monitor.tiny_models import tiny_gpt, train_step
from tests.monitor.titan_shape import Trainer
from torch import nn

from foreshock.cli.main import app
from foreshock.monitor.agent import Agent

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WATCHES: Final = re.compile(r"agent\.step\(|Callback\(run|Tracker\(|watch_torchtitan\(")


def blocks(*languages: str) -> Iterator[Any]:
    """(page, block) of every block in one of these languages; "" is a block without a language."""
    for page in PAGES:
        found = re.findall(r"^```(\S*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        for number, (language, text) in enumerate(found):
            if language in languages:
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


@pytest.mark.parametrize(("page", "text"), [*blocks("python")])
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


def command_lines() -> Iterator[Any]:
    """Every line of a shell block that begins with `foreshock`, without its comment; a backslash goes on."""
    for block in blocks("", "sh", "bash", "console"):
        page, text = block.values
        for line in re.sub(r"\$\([^)]*\)", "VALUE", text.replace("\\\n", " ")).splitlines():
            words = shlex.split(line, comments=True) if "foreshock " in line and line.count("'") % 2 == 0 else []
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words = words[1:]
            if words[:1] == ["foreshock"]:
                ends = [at for at, word in enumerate(words) if word in (">", "&", "|", "<")]
                yield pytest.param(words[1 : min(ends, default=len(words))], id=f"{page.name}: {line.strip()[:70]}")


@pytest.mark.parametrize("words", [*command_lines()])
def test_a_command_line_of_a_page_is_one_that_the_parser_takes(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", "as the page exports it")
    command: Any = typer.main.get_command(app)
    context = command.make_context("foreshock", list(words))
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        _, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command = found
        context = command.make_context(command.name, rest, parent=context)


def test_the_pages_hold_the_blocks_that_this_file_looks_for() -> None:
    assert len(list(blocks("python"))) >= 13
    assert len(list(command_lines())) >= 25
