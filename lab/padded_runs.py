"""Healthy models with padding, masks and sliding windows on a GPU: nothing may be reported about them.

    python -P -m foreshock.lab.padded_runs OUT --model gpt2 --steps 3000

Models are transformers' own with PyTorch's attention, in bf16 autocast, on the bytes of installed Python sources, cut
into pieces of random length and padded on the left. The agent has its defaults. OUT gets what it reported, as JSON.
"""

import argparse
import json
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.monitor import attach

BATCH, LENGTH, PAD = 32, 512, 256


def model_of(name: str, *, tiny: bool) -> nn.Module:
    """GPT-2 small without dropout, or a Gemma 3 of eight layers whose windows slide in five of six."""
    import transformers

    layers, heads, width = (2, 2, 32) if tiny else (12, 12, 768) if name == "gpt2" else (8, 8, 512)
    if name == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=PAD + 1, n_layer=layers, n_head=heads, n_embd=width, n_positions=LENGTH,
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, pad_token_id=PAD,
        )  # fmt: skip
        gpt2: nn.Module = transformers.GPT2LMHeadModel(config)
        return gpt2
    config = transformers.Gemma3TextConfig(
        vocab_size=PAD + 1, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 2,
        head_dim=width // heads, hidden_size=width, intermediate_size=4 * width, sliding_window=128,
        max_position_embeddings=LENGTH, pad_token_id=PAD,
    )  # fmt: skip
    gemma: nn.Module = transformers.Gemma3ForCausalLM(config)
    return gemma


def batches(seed: int, length: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens [batch, length] that begin with padding, and which of them are text."""
    folder = Path(sysconfig.get_paths()["purelib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py"))[:4000])
    draw = np.random.default_rng(seed)
    while True:
        tokens = torch.full((batch, length), PAD)
        for row in tokens:
            size = int(draw.integers(length // 8, length + 1))
            start = int(draw.integers(len(text) - size))
            row[-size:] = torch.tensor(list(text[start : start + size]))
        yield tokens, (tokens != PAD).long()


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=("gpt2", "gemma3"), default="gpt2")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_of(given.model, tiny=given.tiny).to(device)
    model.config._attn_implementation = "sdpa"  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
    agent = attach(model, run=f"padded/{given.model}-{given.seed}")
    events: list[wire.Event] = []
    agent.subscribe(lambda event: None if isinstance(event, wire.Sample) else events.append(event))
    losses: list[float] = []
    began = time.monotonic()
    pieces = batches(given.seed, 64 if given.tiny else LENGTH, 4 if given.tiny else BATCH)
    for step, (tokens, mask) in zip(range(1, given.steps + 1), pieces, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1.0, step / 200)
        tokens, mask = tokens.to(device), mask.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        agent.step(loss, norm, optimizer.param_groups[0]["lr"], step=step)
        if step % 100 == 0:
            losses.append(loss.item())
        if time.monotonic() - began > 60 * given.minutes:
            break
    table = agent.report()
    agent.close()
    said = [event.model_dump(mode="json") for event in events if not isinstance(event, wire.Started)]
    result = {"model": given.model, "steps": step, "seconds": time.monotonic() - began, "losses": losses}
    result |= {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__}
    given.out.write_text(json.dumps(result | {"report": table.splitlines(), "events": said}, indent=1) + "\n")
    print(f"{given.model}: {step} steps, {len(said)} events, loss {losses[-1:]}")


if __name__ == "__main__":
    main()
