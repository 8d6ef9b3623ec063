"""What QK-Clip costs a training step of GPT-2 small: `foreshock bench qk-clip --json FILE`. Needs a CUDA GPU.

Three arms train the same weights in turn, as in `foreshock bench agent`: with an agent alone; with QK-Clip besides,
whose threshold no score passes; and with QK-Clip while every head is just past its threshold in every step, so that all
of W_Q and W_K are written. The act is also timed by itself: on the device, with a cold cache, and on the host.
"""

import json
import math
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
import torch._functorch.config
from torch import Tensor, nn

from foreshock.benchmarks import machine
from foreshock.benchmarks.agent_models import SHAPES, Attention, Shape
from foreshock.benchmarks.agent_step import Bench, nobody_listens
from foreshock.benchmarks.stopwatch import Stopwatch
from foreshock.contract import wire
from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention import new_state
from foreshock.monitor import Agent, attach
from foreshock.monitor.model.layers import find_projection
from foreshock.monitor.qk_clip.scaling import QKClip

THRESHOLD: Final = 100.0
_JUST_PAST: Final = THRESHOLD * (1 + 1e-9)
"""The factor is 1 in float32: every number is read and written, and stays."""


class Clipped:
    """An agent, and QK-Clip over the same model after each of its steps."""

    def __init__(self, model: nn.Module, score: float, agent: Agent | None = None) -> None:
        layers, found = [], []
        for number, (name, module) in enumerate(
            (name, module) for name, module in model.named_modules() if isinstance(module, Attention)
        ):
            heads, kv_heads, dim = module.num_heads, module.num_kv_heads, module.head_dim
            layers.append(
                wire.Layer(
                    layer=number, name=name, heads=tuple(range(heads)), kv_heads=kv_heads, head_dim=dim,
                    served_by="kernel",
                )
            )  # fmt: skip
            found.append(find_projection(module, heads, kv_heads, dim))
        device = next(model.parameters()).device
        self.state = new_state(sum(len(layer.heads) for layer in layers), device)
        self.clip = QKClip(layers, found, self.state, threshold=THRESHOLD)
        if self.clip.refused:
            raise ValueError(f"QK-Clip leaves out layers of this model: {self.clip.refused}")
        self._scores, self._score, self._agent = self.state.view(torch.float64)[:, Slot.SCORE_MAX], score, agent

    def act(self) -> None:
        """As after a step whose largest scores were all `score`."""
        if math.isfinite(self._score):
            self._scores.fill_(self._score)
        self.clip.after_step(on=not self.clip.stale)

    def step(self, loss: Tensor, norm: Tensor, rate: float) -> None:
        """As the agent's."""
        assert self._agent is not None
        self._agent.step(loss, norm, rate)
        self.act()


def measure(shape: Shape, rounds: int, device: str = "cuda", compiler: str = "inductor") -> dict[str, Any]:
    """Milliseconds a step of the arms, and of the act by itself."""
    bench = Bench(shape, device, compiler)
    with ExitStack() as stack:
        settings = stack.enter_context(nobody_listens())

        def attached(model: nn.Module) -> Agent:
            return stack.enter_context(attach(model, **settings))

        bench.arm("agent", Attention, None, attached)
        bench.arm("idle", Attention, None, lambda model: Clipped(model, -math.inf, attached(model)))
        bench.arm("all_heads", Attention, None, lambda model: Clipped(model, _JUST_PAST, attached(model)))
        bench.run(rounds, shape.block_steps)
        arms = {name: 1e3 * statistics.median(arm.seconds) for name, arm in bench.arms.items()}
    result: dict[str, Any] = {"shape": shape.name, "step_milliseconds": arms, "rounds": rounds}
    acts = {name: Clipped(bench.model, score) for name, score in (("idle", -math.inf), ("all_heads", _JUST_PAST))}
    result["act_on_host_milliseconds"] = {name: _on_host(each) for name, each in acts.items()}
    if device == "cuda":
        alone = Stopwatch(50).medians({name: each.act for name, each in acts.items()})
        result["act_on_device_milliseconds"] = alone
        result["share_of_a_step"] = {name: each / arms["agent"] for name, each in alone.items()}
    return result


def _on_host(clipped: Clipped, repeats: int = 50) -> float:
    taken = []
    for _ in range(repeats):
        if clipped.state.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        clipped.act()
        taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken)


def main(json_path: Path | None = None, rounds: int = 12) -> None:
    """Measure, print, and write `json_path`."""
    if not torch.cuda.is_available():
        raise SystemExit("foreshock bench qk-clip needs a CUDA GPU, and this machine has none that PyTorch sees")
    # A graph that was traced under one backend of SDPA would be taken for the other's (pytorch #185449).
    torch._functorch.config.enable_autograd_cache = False
    torch._dynamo.config.recompile_limit = 32  # the arms are graphs of the same code
    result = machine.header(f"foreshock bench qk-clip --rounds {rounds}") | measure(SHAPES[0], rounds)
    print(json.dumps(result, indent=1))
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
