"""A recipe through other people's code: transformers' own GPT2LMHeadModel and Trainer, watched by the callback.

What a recipe says is told to them in their words; the loop, the model, autocast and clipping are theirs. The batches
are those of the same text, drawn by the same seed, but not the same as those of the laboratory's loop.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.training.arm import CONTROL, UNTREATED, Arm, variant
from foreshock.lab.training.corpus import Corpus
from foreshock.lab.training.recipe import Recipe
from foreshock.lab.training.run import FAST_CONTROL, HISTORY_STEPS, text_of
from foreshock.monitor.callbacks.huggingface import ForeshockCallback


def transformers_run(
    recipe: Recipe, arm: Arm, *, seed: int, trace: Path, steps: int | None = None, corpus: Corpus | None = None
) -> None:
    """Train the untreated arm or the control of a recipe and write its trace; the learning rate falls over `steps`.

    Raises ValueError for a recipe that GPT-2, AdamW and a Trainer are not, and for another arm.
    """
    _check(recipe, arm)
    last, shape, corpus = steps or recipe.steps, recipe.model, corpus or text_of(recipe.text)
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocabulary,
            n_positions=shape.context,
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="sdpa",
        )
    )
    cosine = recipe.schedule == "cosine"
    watching = ForeshockCallback(
        run=f"{recipe.name}-transformers-{arm.name}-seed{seed}",
        numerics=arm.numerics,
        sample_every_steps=recipe.sample_every_steps,
        sample_every_seconds=0.0,
        spool_directory=None,
        quiet=True,
        labels={"recipe": recipe.name, "variant": variant(arm.name), "seed": str(seed), "corpus": corpus.sha256[:16]},
        **(FAST_CONTROL if arm is CONTROL and torch.cuda.is_available() else {"attention": "kernels"}),
    )
    header = recipe.header(arm, seed, f"{recipe.name}-transformers-{arm.name}-seed{seed}") | {"loop": "transformers"}
    with tempfile.TemporaryDirectory(prefix="foreshock-trainer-") as folder, TraceWriter(trace, header) as writer:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=recipe.batch,
            max_steps=last,
            learning_rate=recipe.learning_rate,
            lr_scheduler_type="cosine_with_min_lr" if cosine else "constant_with_warmup",
            lr_scheduler_kwargs={"min_lr_rate": 0.1} if cosine else {},
            warmup_steps=min(recipe.warmup_steps, last),
            adam_beta1=recipe.betas[0],
            adam_beta2=recipe.betas[1],
            adam_epsilon=recipe.epsilon,
            weight_decay=recipe.weight_decay,
            max_grad_norm=recipe.clip or 0.0,
            bf16=arm is not CONTROL,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1,
            logging_strategy="steps",
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
            seed=seed,
        )
        keeping = _Keeping(watching, writer)
        windows = _Windows(corpus, shape.context, seed, last * recipe.batch)
        trainer = Trainer(model, settings, train_dataset=windows, callbacks=[watching, keeping])
        trainer.remove_callback(PrinterCallback)  # it would print a line for every step
        trainer.train()
        keeping.flush()


def _check(recipe: Recipe, arm: Arm) -> None:
    shape = recipe.model
    other = shape.rotary or shape.gated or shape.qk_norm or shape.norm != "layer" or shape.kv_heads is not None
    if other or not (shape.qkv_bias and shape.key_bias) or recipe.optimizer != "adamw" or shape.value_offset:
        raise ValueError(
            f"recipe {recipe.name} is no GPT-2 with AdamW; give one that is, such as gpt2-small, or leave out "
            "--transformers"
        )
    if arm not in (UNTREATED, CONTROL):
        raise ValueError(f"arm {arm.name} is not run through transformers; allowed are untreated and control")


class _Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of the text, as many as the run takes."""

    def __init__(self, corpus: Corpus, length: int, seed: int, count: int) -> None:
        starts = torch.Generator().manual_seed(seed)
        self._tokens, self._length = corpus.tokens, length
        self._starts = torch.randint(len(corpus.tokens) - length, (count,), generator=starts)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        start = int(self._starts[place])
        tokens = self._tokens[start : start + self._length].long()
        return {"input_ids": tokens, "labels": tokens}  # the model shifts them


class _Keeping(TrainerCallback):  # type: ignore[misc]
    """Hands the run to a trace: the agent's events, and what the Trainer logs of every step."""

    def __init__(self, watching: ForeshockCallback, writer: TraceWriter) -> None:
        self._watching, self._writer = watching, writer
        self._since, self._kept = 0, list[tuple[float, float]]()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The agent is there by now: its callback comes first."""
        assert self._watching.agent is not None
        self._watching.agent.subscribe(self._writer)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Loss and gradient norm of a step; the summary of the whole run has no norm."""
        logs = kwargs.get("logs") or {}
        if "loss" in logs and "grad_norm" in logs:
            self._kept.append((float(logs["loss"]), float(logs["grad_norm"])))
            if len(self._kept) == HISTORY_STEPS:
                self.flush()

    def flush(self) -> None:
        """Write the steps that wait."""
        if self._kept:
            values = np.array(self._kept)
            self._writer.steps(self._since, values[:, 0], values[:, 1])
            self._since += len(self._kept)
            self._kept.clear()
