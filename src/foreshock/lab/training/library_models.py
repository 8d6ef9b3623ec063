"""Trains models of transformers that no detector was tuned on, watched as `attach(model)` watches them.

    python -P -m foreshock.lab.training.library_models NAME --seed 1 --minutes 20 --folder F

The attention is PyTorch's own, and the recording is one that `foreshock lab score` reads. Text is that of
`foreshock lab corpus folders`; `vit` reads digits of 28 x 28 pixels from an .npz file (`--digits`, arrays `images`
and `labels`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, cast

import numpy as np
import torch
import typer
from torch import Tensor, nn

from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.texts import Corpus, read_text
from foreshock.lab.training.run import Recorder
from foreshock.monitor import Agent, attach

_VOCABULARY: Final = 50_304
_IGNORED: Final = -100
"""The target that cross-entropy leaves out."""
_WIDE: Final = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2}
_TEXT: Final = {"vocab_size": _VOCABULARY, "max_position_embeddings": 2048}
_GPT: Final = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryModel:
    """What is trained: the name of the model's class and of its config's, and how."""

    config: str
    model: str
    fields: dict[str, Any]
    batch: int = 32
    length: int = 512
    """Tokens of a sequence."""
    rate: float = 1e-3
    warmup_steps: int = 500
    dtype: torch.dtype = torch.bfloat16
    """Of autocast; float16 trains with a GradScaler."""
    documents: int = 1
    """So many are packed into each sequence; position ids tell them apart."""


MODELS: Final = {
    "pythia-160m": LibraryModel(
        config="GPTNeoXConfig",
        model="GPTNeoXForCausalLM",
        fields={**_TEXT, **_GPT, "intermediate_size": 3072},
        batch=16,
        length=2048,
    ),
    "opt-125m": LibraryModel(
        config="OPTConfig", model="OPTForCausalLM", fields={**_TEXT, **_GPT}, batch=16, length=2048
    ),
    "mixture": LibraryModel(
        config="MixtralConfig",
        model="MixtralForCausalLM",
        fields={**_TEXT, **_WIDE, "intermediate_size": 1024, "output_router_logits": True},
    ),
    "vit": LibraryModel(
        config="ViTConfig",
        model="ViTForImageClassification",
        fields={
            "hidden_size": 384,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "intermediate_size": 1536,
            "image_size": 28,
            "patch_size": 4,
            "num_channels": 1,
            "num_labels": 10,
        },
        batch=256,
        warmup_steps=10_000,
    ),
    "encoder-decoder": LibraryModel(
        config="BartConfig",
        model="BartForConditionalGeneration",
        fields={
            **_TEXT,
            "d_model": 512,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
            "encoder_ffn_dim": 2048,
            "decoder_ffn_dim": 2048,
        },
    ),
    "float16": LibraryModel(
        config="LlamaConfig",
        model="LlamaForCausalLM",
        fields={**_TEXT, **_WIDE, "intermediate_size": 1408},
        dtype=torch.float16,
    ),
    "packed": LibraryModel(
        config="Qwen2Config",
        model="Qwen2ForCausalLM",
        fields={**_TEXT, **_WIDE, "intermediate_size": 1408},
        documents=4,
    ),
}


class Run:
    """One model in training, with its agent."""

    def __init__(self, name: str, seed: int, *, corpus: Corpus | None = None, digits: Path | None = None) -> None:
        """Raises ValueError for a name that does not exist, or for vit without digits."""
        if name not in MODELS:
            raise ValueError(f"model {name!r} does not exist; allowed are {', '.join(MODELS)}")
        import transformers

        self.made, self.seed, self.step, self.grad_norm = MODELS[name], seed, 0, torch.zeros(())
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(seed)
        self._generator = torch.Generator().manual_seed(seed)
        config = getattr(transformers, self.made.config)(**self.made.fields)
        self.model: nn.Module = getattr(transformers, self.made.model)(config).to(self.device).train()
        self._batch = self._images(digits) if self.made.model.endswith("ImageClassification") else self._texts(corpus)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.made.rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self.made.dtype == torch.float16)
        self.agent: Agent = attach(self.model, run=f"{name}-seed{seed}")

    def _texts(self, corpus: Corpus | None) -> Callable[[], dict[str, Tensor]]:
        corpus, made = corpus or read_text("folders"), self.made
        positions = torch.arange(made.length // made.documents).repeat(made.documents)[None]

        def batch() -> dict[str, Tensor]:
            tokens = corpus.windows(made.batch, made.length, self._generator)[:, :-1].long()
            if made.config == "BartConfig":  # a third of the tokens is hidden from the encoder
                hidden = torch.rand(tokens.shape, generator=self._generator) < 1 / 3
                return {"input_ids": tokens.masked_fill(hidden, _VOCABULARY - 1), "labels": tokens}
            if made.documents == 1:
                return {"input_ids": tokens, "labels": tokens}
            labels = tokens.masked_fill(positions == 0, _IGNORED)
            return {"input_ids": tokens, "labels": labels, "position_ids": positions.expand_as(tokens)}

        return batch

    def _images(self, digits: Path | None) -> Callable[[], dict[str, Tensor]]:
        if digits is None:
            raise ValueError("vit is trained on images; give --digits, an .npz file with `images` and `labels`")
        with np.load(digits) as arrays:
            images, labels = (torch.from_numpy(arrays[name]) for name in ("images", "labels"))

        def batch() -> dict[str, Tensor]:
            chosen = torch.randint(len(images), (self.made.batch,), generator=self._generator)
            shift = torch.randint(-3, 4, (2,), generator=self._generator).tolist()
            pixels = torch.roll(images[chosen], shift, (1, 2))[:, None].float() / 127.5 - 1
            return {"pixel_values": pixels, "labels": labels[chosen].long()}

        return batch

    def advance(self) -> Tensor:
        """One optimizer step; its loss in nats, []."""
        share = min(1.0, (self.step + 1) / self.made.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.made.rate * share
        batch = {name: value.to(self.device, non_blocking=True) for name, value in self._batch().items()}
        with torch.autocast(self.device.type, self.made.dtype):
            loss = cast(Tensor, self.model(**batch).loss)
        self.optimizer.zero_grad(set_to_none=True)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.unscale_(self.optimizer)
        self.grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.step += 1
        self.agent.step(loss=loss, grad_norm=self.grad_norm, learning_rate=self.made.rate * share, step=self.step)
        return loss.detach()


def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}.")],
    folder: Annotated[Path, typer.Option(help="Where the recording is written.")],
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 1,
    steps: Annotated[int, typer.Option(help="At most.", min=1)] = 1_000_000,
    minutes: Annotated[float, typer.Option(help="After which the run ends.")] = 20.0,
    digits: Annotated[Path | None, typer.Option(help="An .npz file of images and labels, for vit.")] = None,
) -> None:
    """Train one of the models and record every head of every sample."""
    run, ends_at, began = Run(name, seed, digits=digits), time.monotonic() + 60 * minutes, time.monotonic()
    header = {"recipe": f"library-{name}", "arm": "untreated", "seed": seed, "run": run.agent.run, "steps": steps}
    header |= {"split": "held-out", "truth": "healthy", "nature": "natural", "policy": "observe"}
    folder.mkdir(parents=True, exist_ok=True)
    with TraceWriter(folder / f"library-{name}_untreated_seed{seed}.jsonl.gz", header) as writer, run.agent:
        recorder = Recorder(run, writer)
        while run.step < steps and time.monotonic() < ends_at:
            recorder.step(run.advance())
            if run.step % 500 == 0:
                loss = float(recorder.losses.mean())
                print(f"step {run.step}: loss {loss:.4f}, {(time.monotonic() - began) / run.step:.3f} s a step")
        recorder.flush()


if __name__ == "__main__":
    typer.run(main)
