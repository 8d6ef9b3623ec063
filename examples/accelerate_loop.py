"""A loop with Accelerate: foreshock is one more tracker, and `accelerator.log` is its step.

python examples/accelerate_loop.py                     # detects and acts alone
accelerate launch examples/accelerate_loop.py --url http://127.0.0.1:8765   # and shows it: foreshock serve
"""

import argparse
import random
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from foreshock.monitor.callbacks.accelerate import ForeshockTracker


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--url", default=None, help="address of a foreshock service")
    options.add_argument("--steps", type=int, default=60)
    chosen = options.parse_args()

    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4))
    tracker = ForeshockTracker(model, run="accelerate", url=chosen.url, policy="auto")  # the one line
    accelerator = Accelerator(log_with=tracker, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list(Path(random.__file__).read_bytes()))
    data = DataLoader(TensorDataset(text[: len(text) // 64 * 64].view(-1, 64)), batch_size=4, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    accelerator.init_trackers("foreshock-example")

    step = 0
    while step < chosen.steps:
        for (batch,) in data:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and step < chosen.steps:
                step += 1
                accelerator.log({"loss": loss.detach(), "lr": 1e-3}, step=step)
    accelerator.end_training()


if __name__ == "__main__":
    main()
