"""The Trainer of Lightning: one callback, and nothing else changes.

python examples/lightning_trainer.py                     # detects and acts alone
python examples/lightning_trainer.py --url http://127.0.0.1:8765   # and shows it: foreshock serve
"""

import argparse
import random
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from foreshock.monitor.callbacks.lightning import ForeshockCallback


class Model(LightningModule):
    """A small GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self.gpt(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--url", default=None, help="address of a foreshock service")
    options.add_argument("--steps", type=int, default=60)
    chosen = options.parse_args()

    text = torch.tensor(list(Path(random.__file__).read_bytes()))
    data = DataLoader(TensorDataset(text[: len(text) // 64 * 64].view(-1, 64)), batch_size=4, shuffle=True)
    callback = ForeshockCallback(run="lightning", url=chosen.url, policy="auto")  # the one line
    trainer = Trainer(
        max_steps=chosen.steps,
        accumulate_grad_batches=2,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
    )
    trainer.fit(Model(), data)


if __name__ == "__main__":
    main()
