"""Trains one variant of a recipe under a watching agent, from the first step or from another variant's checkpoint."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, SupportsFloat, cast

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.texts import Corpus, byte_pairs, folder_text, standard_library
from foreshock.lab.training.model import GPT
from foreshock.lab.training.ranks import Ranks
from foreshock.lab.training.recipes import Recipe, Text
from foreshock.lab.training.variant import Backend, Variant, shown_name
from foreshock.monitor import Agent, attach
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE

_EAGER_STEPS = 3
"""Before a step is captured: kernels are compiled and tuned, and optimizers make their state."""
HISTORY_STEPS = 100
"""Steps whose loss and gradient norm wait on the device."""
Sink = Callable[[wire.Event], None]
_RECIPE, _VARIANT = TypeAdapter(Recipe), TypeAdapter(Variant)
_FAST_FLOAT32 = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""PyTorch's float32 attention without the whole score matrix; the other one where heads share keys."""
FAST_CONTROL: dict[str, Any] = {"attention": "keep"}
"""Settings of the agent that watches it, by a sample of rows."""
_FORCED: dict[Backend, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_OURS = ("attention", "numerics", "sample_every_steps")
"""Settings of the laboratory's agents that an agent over PyTorch's own attention has as by default."""


def text_of(name: Text) -> Corpus:
    """The text of that name. Raises FileNotFoundError where it is not on this machine."""
    makers: dict[Text, Callable[[], Corpus]] = {"bytes": standard_library, "byte pairs": byte_pairs}
    return makers.get(name, folder_text)()


def optimizers(model: GPT, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """What trains `model` under `recipe`; on a GPU ready to be captured in a CUDA graph.

    Raises ValueError for a recipe whose biases have both a rate and a decay of their own.
    """
    if recipe.bias_rate != 1.0 and recipe.bias_decay is not None:
        raise ValueError(f"recipe {recipe.name} gives both bias_rate and bias_decay; give one of them")
    rate, on_gpu = recipe.learning_rate, next(model.parameters()).is_cuda
    matrices = [p for p in model.h.parameters() if p.dim() == 2] if recipe.optimizer == "muon" else []
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    split = [[p for p in others if p.dim() > 1], [p for p in others if p.dim() == 1]]
    groups: list[dict[str, Any]] = [{"params": others}]
    if recipe.bias_rate != 1.0:
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        rest = [p for p in others if all(p is not bias for bias in biases)]
        groups = [{"params": rest}, {"params": biases, "rate_share": recipe.bias_rate}]
    if recipe.bias_decay is not None:
        groups = [{"params": split[0]}, {"params": split[1], "weight_decay": recipe.bias_decay}]
    adamw = torch.optim.AdamW(
        groups,
        lr=torch.tensor(rate, device="cuda") if on_gpu else rate,
        betas=recipe.betas,
        eps=recipe.epsilon,
        weight_decay=recipe.weight_decay,
        fused=True,
        capturable=on_gpu,
    )
    made: list[torch.optim.Optimizer] = [adamw]
    if matrices:
        made.append(
            torch.optim.Muon(matrices, lr=rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    for group in (group for optimizer in made for group in optimizer.param_groups):
        group["initial_lr"] = rate * group.pop("rate_share", 1.0)
    return made


class Training:
    """One run: model, optimizer, text and agent, at some step.

    Equal recipes, variants and seeds give equal runs on one kind of machine; `checkpoint` and `restore` carry a run
    into another variant, which is then identical to the first until something is switched. Several processes (`ranks`)
    share out each batch; the batches are those of one process.
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
        labels: dict[str, str] | None = None,
        ranks: Ranks | None = None,
        **agent_settings: Any,
    ) -> None:
        self.recipe, self.variant, self.seed, self.step = recipe.under(variant), variant, seed, 0
        recipe = self.recipe
        self.ranks = ranks or Ranks()
        self._rows, self.rows_at_once = self.ranks.rows(recipe.batch, recipe.micro_batch)
        self.wants_to_end = False
        """Set it to have every process end after one of its next steps."""
        self.ends = False
        """Whether one of the processes wanted to end two steps ago: all of them know it after the same step."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.corpus = corpus or text_of(recipe.text)
        if variant.backend in ("cudnn", "efficient") and self.device.type == "cpu":
            raise ValueError(
                f"variant {variant.name!r} needs a CUDA GPU: PyTorch has no {variant.backend} attention for a CPU; "
                f"flash-{variant.name.partition('-')[2]} runs on both"
            )
        self._fast = variant.numerics == "float32" and self.device.type == "cuda"
        forced = [] if variant.backend is None else [_FORCED[variant.backend]]
        self._backends = _FAST_FLOAT32 if self._fast else forced
        self._stream = torch.cuda.Stream() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._done: torch.cuda.Event | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        plain_rate = recipe.optimizer == "muon"  # a number, which a graph would keep as it was captured
        self._steady_from = (
            recipe.steps if plain_rate and recipe.schedule == "cosine" else recipe.warmup_steps * plain_rate
        )
        self._eager_steps = 0
        self._captures = self._stream is not None and self.rows_at_once == recipe.batch
        torch.manual_seed(seed)
        self._batches = torch.Generator().manual_seed(seed)
        with self.on_stream():
            self.model = GPT(recipe.model)
            self.model.to(self.device)
            shape = recipe.batch // self.ranks.world, recipe.model.context + 1
            self._windows = torch.zeros(shape, dtype=self.corpus.tokens.dtype, device=self.device)
            self._wishes = torch.zeros((), device=self.device)
            self._history = torch.zeros(HISTORY_STEPS, 2, device=self.device)
            self._place = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.optimizers = optimizers(self.model, recipe)
        self.optimizer = self.optimizers[0]
        """The one that trains biases (and, but for Muon, all else)."""
        known = {
            "recipe": recipe.name,
            "variant": shown_name(variant.name),
            "seed": str(seed),
            "corpus": self.corpus.sha256[:16],
        }
        settings: dict[str, Any] = {
            "run": run or f"{recipe.name}-{variant.name}-seed{seed}".replace("+", "."),
            "url": url,
            "attention": "kernels",
            "numerics": variant.numerics,
            "policy": variant.policy,
            "mitigation": variant.mitigation,
            "switch_scope": variant.switch_scope,
            "qk_clip": variant.qk_clip,
            "labels": known | (labels or {}),
            "sample_every_steps": recipe.sample_every_steps,
            "sample_every_seconds": 0.0,
            "spool_directory": None,
            "quiet": True,
        } | (FAST_CONTROL if self._fast else {})
        if variant.backend is not None:
            settings = {name: value for name, value in settings.items() if name not in _OURS} | {
                "probe_rows": variant.rows
            }
        self._agent_settings = settings | agent_settings
        with self.on_stream():
            self.agent: Agent = attach(self.model, **self._agent_settings)
        self._layers = [vars(m)[LAYER_ATTRIBUTE] for m in self.model.modules() if LAYER_ATTRIBUTE in vars(m)]
        self._kept = self._keeping()
        compiled = recipe.compiled and self.device.type == "cuda"
        whole = torch.compile(self.model, dynamic=False, fullgraph=True) if compiled else self.model
        with self.on_stream():
            self._whole = self.ranks.replica(cast(nn.Module, whole))
        self._begun = False

    def on_stream(self) -> AbstractContextManager[Any]:
        """Where everything of this run happens on a GPU: a stream of its own, so that runs of one process overlap."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def advance(self) -> Tensor:
        """One optimizer step; its loss in nats, [], which the next step may overwrite."""
        with self.on_stream():
            if self._done is not None:
                self._done.synchronize()  # so that a sample is always read one step later, not when it happens to come
            self.ends = bool(self._wishes > 0) if self.ranks.world > 1 else self.wants_to_end
            if self._kept != (kept := self._keeping()):  # a switch waits, which a captured step would hide
                self._kept, self._graph, self._eager_steps = kept, None, 0
            if not self._begun and self.variant.mode != "plain" and self.step == 0:
                self.agent.set_mode(self.agent.modes(), self.variant.mode, reason=f"variant {self.variant.name}")
            self._begun = True
            rate = self._set_rate()
            self._windows.copy_(self._next_windows(), non_blocking=True)
            loss, norm = self._step()
            self.step += 1
            self.agent.step(loss=loss, grad_norm=norm, learning_rate=rate, step=self.step)
            if self._stream is not None:
                self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._done.record()
        return loss

    def _keeping(self) -> list[bool]:
        """Which layers keep PyTorch's own attention."""
        return [layer.backend == "native" for layer in self._layers]

    @property
    def _steady(self) -> bool:
        """Whether every further step does the same, but for its batch."""
        return self.step >= self._steady_from

    def _set_rate(self) -> float:
        recipe = self.recipe
        share = recipe.rate_share(self.step + 1)
        rising = self.step <= recipe.warmup_steps
        moving = rising or recipe.schedule == "cosine" or self._eager_steps == 0 or not self._steady
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            if not torch.is_tensor(group["lr"]):
                group["lr"] = group["initial_lr"] * share
            elif moving:
                group["lr"].fill_(group["initial_lr"] * share)
        return recipe.learning_rate * share

    def _next_windows(self) -> Tensor:
        return self.corpus.windows(self.recipe.batch, self.recipe.model.context, self._batches)[self._rows]

    def _step(self) -> tuple[Tensor, Tensor]:
        """Loss and gradient norm of one optimizer step: on a GPU captured once as a CUDA graph, and then replayed.

        Not where a batch is taken in parts: processes wait for one another, and long steps hide what launches cost.
        """
        if self._graph is not None:
            self._graph.replay()
        elif not self._captures or self._eager_steps < _EAGER_STEPS or not self._steady:
            self._eager_steps += 1
            self._loss, self._norm = self._compute()
        else:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._loss, self._norm = self._compute()
            self._graph.replay()  # capturing computed nothing
        return self._loss, self._norm

    def _compute(self) -> tuple[Tensor, Tensor]:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss = self._gradients()
        weights = list(self.model.parameters())
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
        if self.recipe.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(weights, self.recipe.clip, norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self._history.index_copy_(0, self._place, torch.stack([loss, norm]).view(1, 2))
        self._place.add_(1).remainder_(HISTORY_STEPS)
        return loss, norm

    def _gradients(self) -> Tensor:
        """The loss of the batch [], of all processes. Only the last pass has gradients wait for those of the others."""
        parts = torch.split(self._windows, self.rows_at_once)
        losses = []
        for number, part in enumerate(parts, start=1):
            with self.ranks.in_part(self._whole, last=number == len(parts)):
                loss = self.loss_of(part) / len(parts)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        whole = torch.stack(losses).sum()
        if self.ranks.world > 1:
            wish = torch.full_like(whole, self.wants_to_end)
            whole, self._wishes = self.ranks.mean(torch.stack([whole, wish])).unbind()
        return whole

    def loss_of(self, windows: Tensor) -> Tensor:
        """The loss of `windows` [N, context + 1] on its device, [] in nats, with its graph."""
        tokens = windows.long()
        with sdpa_kernel(self._backends, set_priority=True) if self._backends else nullcontext():
            loss: Tensor = self._whole(tokens[:, :-1], tokens[:, 1:])
        return loss

    def history(self, count: int) -> tuple[Floats, Floats]:
        """Loss and gradient norm of the last `count` steps, at most HISTORY_STEPS."""
        with self.on_stream():
            kept = self._history.roll(-int(self._place), 0)[-count:].double().cpu().numpy()
        return kept[:, 0], kept[:, 1]

    def next_loss(self) -> Tensor:
        """The loss of the run's next batch, or of its first part, [] in nats, with its graph."""
        return self.loss_of(self._next_windows()[: self.rows_at_once].to(self.device))

    def checkpoint(self) -> dict[str, Any]:
        """Everything that the next step depends on, copied, and what was run; `torch.save` takes it."""
        with self.on_stream():
            state = {"model": self.model.state_dict(), "optimizers": [each.state_dict() for each in self.optimizers]}
            copied = torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, state)
            watching = self.agent.state_dict()
        if self._stream is not None:
            self._stream.synchronize()
        return {
            **copied,
            "batches": self._batches.get_state(),
            "agent": watching,
            "random": [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self.device.type == "cuda" else [])],
            "step": self.step,
            "text": self.corpus.sha256,
            "recipe": _RECIPE.dump_python(self.recipe, mode="json"),
            "arm": _VARIANT.dump_python(self.variant, mode="json"),
            "seed": self.seed,
        }

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Go on from `checkpoint`, which may be another variant's. Call it before the first step."""
        with self.on_stream():
            self.model.load_state_dict(checkpoint["model"])
            for optimizer, state in zip(self.optimizers, checkpoint["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.agent.load_state_dict(checkpoint["agent"])
        self._batches.set_state(checkpoint["batches"].cpu())
        torch.set_rng_state(checkpoint["random"][0].cpu())
        if self.device.type == "cuda" and checkpoint["random"][1:]:
            torch.cuda.set_rng_state(checkpoint["random"][1].cpu())
        self.step = int(checkpoint["step"])


def train(
    training: Training,
    steps: int,
    *,
    sinks: tuple[Sink, ...] = (),
    on_step: Callable[[int, SupportsFloat], None] = lambda step, loss: None,
    deadline: float | None = None,
) -> wire.Finished:
    """Run `training` up to step `steps`, until the monotonic clock passes `deadline`, but one step at least, or until a
    process of it wants to end; closes its agent.
    """
    finished: list[wire.Finished] = []

    def listen(event: wire.Event) -> None:
        if isinstance(event, wire.Finished):
            finished.append(event)

    for sink in (*sinks, listen):
        training.agent.subscribe(sink)
    with training.on_stream(), training.agent:
        began = training.step
        while training.step < steps and (deadline is None or training.step == began or time.monotonic() < deadline):
            loss = training.advance()
            on_step(training.step, loss)
            if training.ends:
                break
        if training.ends:
            training.agent.close("stopped")
    return finished[0]


class Recorder:
    """Hands a run to a trace: the agent's events, and loss and gradient norm of every step."""

    def __init__(self, training: Training, writer: TraceWriter) -> None:
        self._training, self._writer = training, writer
        self._since = training.step
        training.agent.subscribe(lambda event: writer(event, training.agent.readings))

    def step(self) -> None:
        """Call it after every step."""
        if self._training.step - self._since == HISTORY_STEPS:
            self.flush()

    def flush(self) -> None:
        """Write the steps that wait."""
        training, count = self._training, self._training.step - self._since
        if count:
            losses, norms = training.history(count)
            self._writer.steps(self._since, losses, norms)
            self._since = training.step
