"""`attach`: one line that finds a model's attention, says what it found and puts the watched attention under it."""

import difflib
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Unpack

import torch
from torch import Tensor, nn

from foreshock.contract.slots import SLOT_COUNT, identity_row
from foreshock.contract.wire import MAX_LAYERS, Layer
from foreshock.monitor.agent import Agent
from foreshock.monitor.agent_settings import AgentSettings
from foreshock.monitor.attention.interception import sdpa_rebinding, watch_module
from foreshock.monitor.attention.keep_attention import Keeper
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE, WatchedLayer, logger
from foreshock.monitor.config import AgentConfig, make_config
from foreshock.monitor.instruments import Instruments, thinning_of
from foreshock.monitor.model.discovery import Found, find_attention
from foreshock.monitor.model.table import table_of
from foreshock.monitor.sampling.thinning import Thinning, new_cadence

_NO_ATTENTION: Final = (
    "no attention was found in {model}: no module calls torch.nn.functional.scaled_dot_product_attention, "
    "torch.nn.attention.varlen.varlen_attn or transformers' attention interface; write it with one of them"
)


def attach(model: nn.Module, config: AgentConfig | None = None, **overrides: Unpack[AgentSettings]) -> Agent:
    """Watch every attention layer of `model`, which stays as it is; `Agent.detach` takes everything back.

    Call it when the model lies on its device and before torch.compile. Prints a table of what was found to standard
    error, unless `quiet`. What is watched, and why it foretells an explosion: arXiv 2510.04212, section 3.

    model: any module with attention in it, whole or a shard of it (DDP, FSDP2, tensor or pipeline parallel).
    config: the settings; by default those of the variables FORESHOCK_*.
    overrides: fields of AgentConfig, which go before `config` and variables: `run`, `url`, `policy`, `attention`, ...

    Returns the agent: call `step` after every optimizer step, and `close` at the end, or use it in a `with` statement.
    Raises ValueError with a sentence for a wrong setting, a model without attention, a model that is compiled or
    watched already.
    """
    settings = make_config(config, {**_place(config), **overrides})
    _refuse_unfit(model)
    _refuse_unknown_names(model, settings)
    found = find_attention(model, settings.heads)
    watched = [f for f in found if f.problem is None]
    if not found:
        raise ValueError(_NO_ATTENTION.format(model=type(model).__name__))
    if not watched:
        raise ValueError("; ".join(f"{names} cannot be watched: {why}" for names, why in _problems(found)))
    if len(watched) > MAX_LAYERS:
        raise ValueError(f"{len(watched)} attention layers were found; at most {MAX_LAYERS} can be watched")
    placed = _Buffers(watched, _device(watched[0].module, model), settings)
    layers = placed.layers(watched, settings)
    prove = settings.attention == "auto" and _accelerated(placed.state.device)
    keeper = Keeper(layers, placed.state, settings, prove=prove)
    undo = _install(model, watched, layers, keeper, numbered=settings.attention == "kernels" or prove)
    try:
        agent = Agent(settings, _instruments(settings, found, watched, placed, keeper), undo)
    except BaseException:
        undo()
        raise
    _agents.update(dict.fromkeys(layers, weakref.ref(agent)))
    return agent


_agents: Final[weakref.WeakKeyDictionary[WatchedLayer, weakref.ref[Agent]]] = weakref.WeakKeyDictionary()


def detach(model: nn.Module) -> None:
    """Close every agent that watches a module of `model`, which is then as before `attach`; nothing where none does.

    For where the agent that `attach` returned is out of reach. The service is told that the run was stopped.
    """
    layers = [vars(module)[LAYER_ATTRIBUTE] for module in model.modules() if LAYER_ATTRIBUTE in vars(module)]
    for layer in layers:
        agent = known() if (known := _agents.get(layer)) is not None else None
        if agent is not None:
            agent.close("stopped")


def _place(config: AgentConfig | None) -> dict[str, int]:
    """Rank and world size as torch.distributed knows them, where neither the user nor the launcher tells them."""
    told = set(config.model_fields_set if config is not None else ()) | {name.lower() for name in os.environ}
    if not told.isdisjoint(("rank", "world_size", "foreshock_rank", "foreshock_world_size")):
        return {}
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return {}
    return {"rank": torch.distributed.get_rank(), "world_size": torch.distributed.get_world_size()}


def _refuse_unfit(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"attach takes a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.DataParallel):
        raise ValueError("nn.DataParallel runs copies of the model in threads; use DistributedDataParallel")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model lies on the meta device, without numbers; attach when its weights have a device")
    for name, module in model.named_modules():
        if LAYER_ATTRIBUTE in module.__dict__:
            raise ValueError(f"{name or 'the model'} is watched by another agent; detach that one first")
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(f"{name or 'the model'} is compiled already; attach first, then compile")


def _refuse_unknown_names(model: nn.Module, settings: AgentConfig) -> None:
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for setting, told in (("heads", settings.heads), ("layers", settings.layers)):
        for unknown in told.keys() - names:
            near = difflib.get_close_matches(unknown, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "; report() of an agent without it lists them"
            raise ValueError(f"{setting} names {unknown[:100]!r}, which is no module of the model{hint}")


def _accelerated(device: torch.device) -> bool:
    """Whether our kernels are worth proving there; on a CPU the reference would serve, which is slow."""
    return device.type != "cpu"


def _device(module: nn.Module, model: nn.Module) -> torch.device:
    for parameter in (*module.parameters(), *model.parameters()):
        return parameter.device
    return torch.device("cpu")


@dataclass(slots=True)
class _Buffers:
    """State, modes and cadence of all layers, each one packed buffer (house decision 3)."""

    state: Tensor
    modes: Tensor
    thinning: Thinning | None
    _cadences: tuple[Tensor | None, ...]

    def __init__(self, watched: list[Found], device: torch.device, settings: AgentConfig) -> None:
        total = sum(f.heads for f in watched)
        self.state = torch.from_numpy(identity_row()).repeat(total, 1).to(device)
        self.modes = torch.zeros(total, dtype=torch.int32, device=device)
        assert self.state.shape[1] == SLOT_COUNT
        self.thinning, self._cadences = None, (None,) * len(watched)
        if settings.count_every_blocks > 1:
            cadence, heads = new_cadence(len(watched), device), [f.heads for f in watched]
            self.thinning = thinning_of(cadence, heads, settings.count_every_blocks, settings.detectors)
            self._cadences = cadence.unbind()

    def layers(self, watched: list[Found], settings: AgentConfig) -> list[WatchedLayer]:
        sizes = [f.heads for f in watched]
        states, modes = torch.split(self.state, sizes), torch.split(self.modes, sizes)
        return [
            WatchedLayer(f.name or "model", state, flags, settings.numerics, cadence=cadence, strict=settings.strict)
            for f, state, flags, cadence in zip(watched, states, modes, self._cadences, strict=True)
        ]


def _install(
    model: nn.Module, watched: list[Found], layers: list[WatchedLayer], keeper: Keeper, *, numbered: bool
) -> Callable[[], None]:
    undos: list[Callable[[], None]] = [keeper.stop]

    def undo() -> None:
        while undos:
            undos.pop()()

    try:
        for found, layer in zip(watched, layers, strict=True):
            undos.append(watch_module(found.module, layer))
        routes = {found.route for found in watched}
        if "transformers" in routes:
            from foreshock.monitor.attention.transformers_attention import watch_dispatch
            from foreshock.monitor.attention.transformers_positions import watch_positions

            undos.append(watch_dispatch())
            if numbered:
                undos.append(watch_positions(model))
        sdpa_rebinding.acquire()
        undos.append(sdpa_rebinding.release)
    except BaseException:
        undo()
        raise
    return undo


def _instruments(
    settings: AgentConfig, found: list[Found], watched: list[Found], placed: _Buffers, keeper: Keeper
) -> Instruments:
    served_by = "kernel" if placed.state.is_cuda and settings.numerics in ("auto", "kernel") else "reference"
    sampled = settings.attention != "kernels"
    layers = tuple(
        Layer(
            layer=settings.layers.get(f.name, settings.first_layer + index),
            name=f.name or "model",
            heads=tuple(range(settings.first_head + f.first_head, settings.first_head + f.first_head + f.heads)),
            kv_heads=f.kv_heads or f.heads,  # older services take no less than one
            kv_heads_known=f.kv_heads > 0,
            head_dim=f.head_dim,
            served_by="probe" if sampled else served_by,
            sampled=sampled,
        )
        for index, f in enumerate(watched)
    )
    for names, why in _problems(found):
        logger.warning("foreshock: the attention of %s is not watched: %s", names, why)
    for f in found:
        if f.also and f.problem is None:
            same = ", ".join(f.also)
            logger.warning("foreshock: %s is the same module as %s; their rows count into one layer", same, f.name)
    now = "kept, sampled" if sampled else served_by
    numerics = _NUMERICS.get(settings.numerics, settings.numerics)
    report = f"{table_of(found, now)}\nnumerics: {numerics}\n{keeper.describe()}"
    if settings.rank == 0 and not settings.quiet:
        print(report, file=sys.stderr)
    return Instruments(
        state=placed.state,
        modes=placed.modes,
        layers=layers,
        watched=tuple(f.module for f in watched),
        projections=tuple(f.projection for f in watched),
        report=report,
        keeper=keeper,
        thinning=placed.thinning,
        unwatched=sum(f.problem is not None for f in found),
    )


def _problems(found: list[Found]) -> list[tuple[str, str]]:
    """The modules that cannot be watched, those of one problem together, and the problem of the first of them."""
    groups: dict[str, list[Found]] = {}
    for f in found:
        if f.problem is not None:
            groups.setdefault(f.problem.replace(f'"{f.name}"', '""'), []).append(f)
    return [(", ".join(f.name or "the model" for f in alike), str(alike[0].problem)) for alike in groups.values()]


_NUMERICS: Final = {"auto": "auto (kernel for 16-bit operands, float32 for fp32, float64 for float64)"}
