"""Use foreshock with the Trainer of transformers: add one callback.

python examples/huggingface_trainer.py --url http://127.0.0.1:8765     # with a service: foreshock serve
"""

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from foreshock.callbacks import TransformersCallback


class Text(torch.utils.data.Dataset[dict[str, Any]]):
    """Bytes of a module of the standard library, in sequences of 64."""

    def __init__(self) -> None:
        self.tokens = torch.tensor(list(Path(random.__file__).read_bytes()))

    def __len__(self) -> int:
        return len(self.tokens) // 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        piece = self.tokens[index * 64 : index * 64 + 64]
        return {"input_ids": piece, "labels": piece}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--url", default=None, help="address of a foreshock service")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--output", default="trainer-output", help="where the Trainer puts its checkpoints")
    chosen = options.parse_args()

    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4))
    arguments = TrainingArguments(
        output_dir=chosen.output,
        max_steps=chosen.steps,
        per_device_train_batch_size=8,
        report_to=[],
        logging_steps=20,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    callback = TransformersCallback(run="trainer", url=chosen.url, policy="auto")  # adds foreshock
    Trainer(model, arguments, train_dataset=Text(), callbacks=[callback]).train()


if __name__ == "__main__":
    main()
