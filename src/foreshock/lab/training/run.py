"""Train one variant of a recipe with an agent attached, from the first step or from a checkpoint."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final, SupportsFloat, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from foreshock.contract.slots import Floats
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.texts import Corpus, read_text, standard_library
from foreshock.lab.training.model import GPT
from foreshock.lab.training.ranks import Ranks
from foreshock.lab.training.recipes import Recipe
from foreshock.lab.training.variant import Variant, shown_name
from foreshock.monitor import Agent, AgentConfig, attach

_WAITING: Final = 100
"""Steps whose loss and gradient norm are buffered on the device before they are written."""


class Training:
    """One run: model, optimizer, dataset and agent, at some step.

    Equal recipes, variants and seeds give identical runs on the same kind of machine, also after a checkpoint is
    restored. Several processes (`ranks`) split each batch; the global batches are the same as with one process.
    """

    def __init__(
        self,
        recipe: Recipe,
        variant: Variant,
        seed: int,
        *,
        run: str = "",
        url: str | None = None,
        corpus: Corpus | None = None,
        ranks: Ranks | None = None,
        **agent_settings: Any,
    ) -> None:
        self.recipe, self.variant, self.seed, self.step = recipe.under(variant), variant, seed, 0
        recipe = self.recipe
        self.ranks = ranks or Ranks()
        self._rows, self._rows_at_once = self.ranks.rows(recipe.batch, recipe.micro_batch)
        self.wants_to_end = False
        """Set it to True to end all processes after one of the next steps."""
        self.ends = False
        """Whether any process has set `wants_to_end`; becomes True after the same step in all processes."""
        self._wishes = torch.zeros(())
        self.grad_norm = torch.zeros(())
        """Gradient norm of the last step, before clipping."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.corpus = corpus or (standard_library() if recipe.text == "bytes" else read_text(recipe.text))
        # On a GPU the float32 control keeps PyTorch's attention, which does not store the whole score matrix, except
        # when heads share keys.
        keeps_exact = variant.numerics == "float32" and self.device.type == "cuda"
        exact = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        self._backends = exact if keeps_exact else [SDPBackend.FLASH_ATTENTION] if variant.backend else []
        torch.manual_seed(seed)
        self._batches = torch.Generator().manual_seed(seed)
        self.model = GPT(recipe.model).to(self.device)
        weights = {"params": list(self.model.parameters()), "initial_lr": recipe.learning_rate}
        self.optimizer = torch.optim.AdamW([weights], betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True)
        labels = {"recipe": recipe.name, "variant": shown_name(variant.name), "seed": str(seed)}
        settings: dict[str, Any] = {
            "run": run or f"{recipe.name}-{variant.name}-seed{seed}",
            "url": url,
            "policy": variant.policy,
            "labels": labels | {"corpus": self.corpus.sha256[:16]},
            "sample_every_steps": AgentConfig.sampled_steps,
            "spool_directory": None,
            "quiet": True,
        }
        if variant.backend is None:
            settings["attention"] = "keep" if keeps_exact else "kernels"
            settings |= {"numerics": variant.numerics, "sample_every_steps": recipe.sample_every_steps}
        self.agent: Agent = attach(self.model, **settings | agent_settings)
        compiled = recipe.compiled and self.device.type == "cuda"
        whole = cast(nn.Module, torch.compile(self.model, dynamic=False, fullgraph=True)) if compiled else self.model
        self._whole = whole if self.ranks.world == 1 else DistributedDataParallel(whole)

    def advance(self) -> Tensor:
        """Run one optimizer step and return its loss in nats, []."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # so that the agent always reads a sample exactly one step later
        self.ends = bool(self._wishes > 0) if self.ranks.world > 1 else self.wants_to_end
        if self.step == 0 and self.variant.mode != "plain":
            self.agent.set_mode(self.agent.modes(), self.variant.mode, reason=f"variant {self.variant.name}")
        share = self.recipe.rate_share(self.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._gradients()
        weights = list(self.model.parameters())
        self.grad_norm = torch.nn.utils.get_total_norm([each.grad for each in weights if each.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(weights, self.recipe.clip, self.grad_norm)
        self.optimizer.step()
        self.step += 1
        rate = self.recipe.learning_rate * share
        self.agent.step(loss=loss, grad_norm=self.grad_norm, learning_rate=rate, step=self.step)
        return loss

    def _next_windows(self) -> Tensor:
        windows = self.corpus.windows(self.recipe.batch, self.recipe.model.context, self._batches)
        return windows[self._rows].to(self.device)

    def _gradients(self) -> Tensor:
        """Compute gradients, and return the loss of the global batch []; synchronise only in the last micro-batch."""
        parts = torch.split(self._next_windows(), self._rows_at_once)
        losses = []
        for number, part in enumerate(parts, start=1):
            several = isinstance(self._whole, DistributedDataParallel)
            with cast(Any, self._whole).no_sync() if several and number < len(parts) else nullcontext():
                loss = self._loss_of(part) / len(parts)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        whole = torch.stack(losses).sum()
        if self.ranks.world > 1:
            wish = torch.full_like(whole, self.wants_to_end)
            whole, self._wishes = self.ranks.mean(torch.stack([whole, wish])).unbind()
        return whole

    def _loss_of(self, windows: Tensor) -> Tensor:
        tokens = windows.long()
        with sdpa_kernel(self._backends, set_priority=True) if self._backends else nullcontext():
            loss: Tensor = self._whole(tokens[:, :-1], tokens[:, 1:])
        return loss

    def checkpoint(self) -> dict[str, Any]:
        """Return all state that the next step depends on, and the names of the run. Save it before the next step."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "batches": self._batches.get_state(),
            "agent": self.agent.state_dict(),
            "random": [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self.device.type == "cuda" else [])],
            "step": self.step,
            "text": self.corpus.sha256,
            "recipe": self.recipe.name,
            "variant": shown_name(self.variant.name),
            "seed": self.seed,
        }

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Restore `checkpoint`; call it before the first step."""
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.agent.load_state_dict(checkpoint["agent"])
        self._batches.set_state(checkpoint["batches"].cpu())
        torch.set_rng_state(checkpoint["random"][0].cpu())
        if self.device.type == "cuda" and checkpoint["random"][1:]:
            torch.cuda.set_rng_state(checkpoint["random"][1].cpu())
        self.step = int(checkpoint["step"])


def train(
    training: Training, steps: int, on_step: Callable[[int, SupportsFloat], None] = lambda step, loss: None
) -> None:
    """Run `training` up to step `steps` or until a process sets `wants_to_end`, then close its agent."""
    with training.agent:
        while training.step < steps and not training.ends:
            loss = training.advance()
            on_step(training.step, loss)
        if training.ends:
            training.agent.close("stopped")


class Recorder:
    """Writes the agent's events, and loss and gradient norm of every step, to a trace."""

    def __init__(self, training: Training, writer: TraceWriter) -> None:
        self._training, self.writer, self._since = training, writer, training.step
        self._waiting: list[Tensor] = []
        self.losses: Floats = np.zeros(0)
        """Losses of the steps of the last write."""
        training.agent.subscribe(lambda event: writer(event, training.agent.readings))

    def step(self, loss: SupportsFloat) -> None:
        """Record the loss and gradient norm of a step; call it after every step."""
        self._waiting.append(torch.stack([cast(Tensor, loss), self._training.grad_norm]))
        if len(self._waiting) == _WAITING:
            self.flush()

    def flush(self) -> None:
        """Write the buffered steps."""
        if self._waiting:
            self.losses, norms = torch.stack(self._waiting).double().cpu().numpy().T
            self.writer.steps(self._since, self.losses, norms)
            self._since += len(self._waiting)
            self._waiting.clear()
