"""`attach`: one line that finds a model's attention, prints what it found and puts the watched attention under it."""

import difflib
import functools
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final, Unpack

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from foreshock.contract.wire import MAX_LAYERS, Layer, first_error
from foreshock.kernels.flash_attention import new_state
from foreshock.monitor.agent import Agent
from foreshock.monitor.agent_settings import AgentSettings
from foreshock.monitor.assessment import openness, rounding
from foreshock.monitor.attached_model import AttachedModel
from foreshock.monitor.attention.backend_selector import BackendSelector
from foreshock.monitor.attention.coverage import UnwatchedAttentionFinder, lies_in
from foreshock.monitor.attention.interception import leave_no_copies, sdpa_rebinding, watch_module
from foreshock.monitor.attention.layout_check import LayoutCheck
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE, WatchedLayer, is_watched
from foreshock.monitor.config import AgentConfig, make_config
from foreshock.monitor.guard import default_torch_modes, logger
from foreshock.monitor.model.discovery import Found, find_attention, is_called_attention, table_of
from foreshock.monitor.model.layers import device_of


def attach(model: nn.Module, config: AgentConfig | None = None, **overrides: Unpack[AgentSettings]) -> Agent:
    """Watch every attention layer of `model`, which stays as it is; `Agent.detach` takes everything back.

    Call it after moving the model to its device and before torch.compile. The first step shows which modules compute
    attention; the agent then prints a table of them to standard error, unless `quiet`. What is watched, and why it
    foretells an explosion: arXiv 2510.04212, section 3.

    model: any module with attention in it, whole or a shard of it (DDP, FSDP2, tensor or pipeline parallel).
    config: the settings; by default those of the variables FORESHOCK_*.
    overrides: fields of AgentConfig, which go before `config` and variables: `run`, `url`, `policy`, `attention`, ...

    Returns the agent: call `step` after every optimizer step, and `close` at the end, or use it in a `with` statement.
    One that nothing refers to any more is closed.
    If no attention can be watched, a line of the log says why, and the agent goes on with loss and gradient norm; with
    `strict`, with QK-Clip or under a policy that switches heads it is a ValueError, of `attach` (a compiled model,
    `nn.DataParallel`) or of the first `Agent.step`. Raises ValueError with a sentence for a wrong setting.
    """
    settings = make_config(config, {**_place(config), **overrides})
    if not isinstance(model, nn.Module):
        raise ValueError(f"attach takes a torch.nn.Module, got {type(model).__name__}")
    if hasattr(sys, "ps1"):  # a cell or a line that is run again: Python and IPython have a prompt then
        _close_former(model, settings)
    for name, module in model.named_modules():
        if is_watched(module):
            raise ValueError(f"{name or 'the model'} is watched by another agent; call foreshock.detach(model) first")
    _refuse_unknown_names(model, settings)
    found, unfit = _find(model, settings)
    if unfit and settings.must_watch:
        raise ValueError(unfit)
    if unfit:
        logger.warning("foreshock: no attention is watched, training continues: %s", unfit)
    attached = _put_under(model, settings, found, unfit=unfit)
    try:
        agent = Agent(settings, attached)
    except BaseException:
        attached.leave()
        raise
    _agents.update(dict.fromkeys((attached.selector, *attached.selector.layers), weakref.ref(agent)))
    return agent


def _put_under(
    model: nn.Module,
    settings: AgentConfig,
    found: list[Found],
    before: Mapping[str, tuple[WatchedLayer, LayoutCheck]] | None = None,
    unfit: str = "",
) -> AttachedModel:
    """Watch what was found. `before`: layers that go on, by name."""
    watched = [f for f in found if f.problem is None]
    device = device_of(*(f.module for f in watched[:1]), model) if not unfit else torch.device("cpu")
    ours = "kernel" if device.type == "cuda" and settings.numerics in ("auto", "kernel") else "reference"
    described = _described(watched, settings, ours)
    with default_torch_modes(device):
        sizes = [f.heads for f in watched]
        state = new_state(max(sum(sizes), 1), device)[: sum(sizes)]
        modes = torch.zeros(len(state), dtype=torch.int32, device=device)
        layers: list[WatchedLayer] = []
        checks: list[LayoutCheck] = []
        for f, own_state, own_modes in zip(watched, state.split(sizes), modes.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            layer = WatchedLayer(f.name or "model", own_state, own_modes, settings.numerics, strict=settings.strict)
            former, check = (before or {}).get(layer.name, (None, None))
            layer.late = before is not None and former is None
            if former is not None:
                layer.go_on(former)
            layer.layout = check = check or LayoutCheck(f.owner, f.heads, f.projection or f.unmeasured)
            layers.append(layer)
            checks.append(check)
        selector = BackendSelector(layers, state, settings)
    open_to = openness(model, watched)
    of_modules = [(f.module, check) for f, check in zip(watched, checks, strict=True)]
    finder = UnwatchedAttentionFinder(model, [f.name for f in found], settings.heads, of_modules)
    return AttachedModel(
        state=state,
        modes=modes,
        layers=described,
        layouts=tuple(checks),
        kernels=ours,
        weights=_some_weights(watched),
        report=_report(settings, found, selector, ours),
        danger=lambda: rounding(*open_to, rounds=any(layer.rounds for layer in layers))[0],
        unfit=unfit,
        selector=selector,
        finder=finder,
        model=weakref.ref(model),
        unwatched=len(found) - len(watched),
        corrected=functools.partial(_corrected, settings, found),
        leave=_install(model, of_modules, selector, finder),
    )


def _corrected(settings: AgentConfig, found: list[Found], attached: AttachedModel) -> AttachedModel | None:
    """The model watched as the first step showed, in the place of `attached`; None where that was right."""
    model, selector, finder = attached.model(), attached.selector, attached.finder
    if model is None or selector.sampling.captured or sdpa_rebinding.follow_imports():
        return None  # calls of a library that the first step imported are met from now on
    if (ran := _as_it_ran(model, found, selector.layers, finder)) is None:
        return None
    before = {layer.name: (layer, check) for layer, check in zip(selector.layers, attached.layouts, strict=True)}
    known = _agents.get(selector)
    attached.leave()
    unfit = "; ".join(f"{names} cannot be watched: {why}" for names, why in _problems(ran))
    now = _put_under(model, settings, ran, before, "" if any(f.problem is None for f in ran) else unfit)
    now.finder.scouted()
    now.finder.broken_softmax = finder.broken_softmax
    for layer in now.selector.layers:
        if layer.late and settings.numerics == "auto":
            layer.rounds = finder.called[layer.name if layer.name in finder.called else ""].rounds
    if known is not None:
        _agents.update(dict.fromkeys((now.selector, *now.selector.layers), known))
    return now


def _as_it_ran(
    model: nn.Module, found: list[Found], layers: Sequence[WatchedLayer], finder: UnwatchedAttentionFinder
) -> list[Found] | None:
    """What computes attention, as the first step showed; None where it is what was found."""
    sure = [f.name for f in found if f.certain]
    called = {n: call for n, call in finder.called.items() if not any(lies_in(n, outer) for outer in sure)}
    ran: list[Found] = []
    watched = iter(layers)
    for f in found:
        layer = None if f.problem is not None else next(watched)
        within = any(lies_in(name, f.name) for name in called) and f.name not in finder.direct
        if within and not f.certain:
            continue  # modules within it call attention, each for itself
        if layer is None or f.certain or not layer.idle:
            ran.append(f)
        elif why := finder.why_unmet(f.name):
            ran.append(replace(f, problem=f"it {why}; have it call scaled_dot_product_attention"))
        elif not finder.has_read:
            ran.append(f)  # no backward was read that would show it
        elif is_called_attention(f.module):
            ran.append(replace(f, problem=layer.why_not_counted))
    ran += find_attention(model, {}, called)
    if [f.problem for f in ran] == [f.problem for f in found] and len(ran) == len(found):
        return None
    places = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return sorted(ran, key=lambda f: places[f.name])


_agents: Final[weakref.WeakKeyDictionary[object, weakref.ref[Agent]]] = weakref.WeakKeyDictionary()


def detach(model: nn.Module) -> None:
    """Close every agent that watches a module of `model`, which is then as before `attach`; nothing where none does.

    For where the agent that `attach` returned is out of reach. The service then shows the run as stopped.
    """
    layers = [vars(module)[LAYER_ATTRIBUTE] for module in model.modules() if is_watched(module)]
    for layer in layers:
        agent = known() if (known := _agents.get(layer)) is not None else None
        if agent is not None:
            agent.close("stopped")


def _close_former(model: nn.Module, settings: AgentConfig) -> None:
    """Close the agent of this model and that of this run.

    IPython holds what a cell showed, so the agent of a former model would live on as a second process of its rank.
    """
    of_model = {vars(module).get(LAYER_ATTRIBUTE) for module in model.modules()}
    for layer, known in list(_agents.items()):
        if (agent := known()) is not None and not agent._closed:
            same_run = settings.run and (agent.run, agent.config.rank) == (settings.run, settings.rank)
            if same_run or layer in of_model:
                agent.close("stopped")
                logger.warning("foreshock: the agent of run %s was closed; a new one takes its place", agent.run)


_SIZES: Final = ("world_size", "foreshock_world_size")


def _place(config: AgentConfig | None) -> dict[str, int]:
    """Rank and world size as torch.distributed knows them, where neither the user nor the launcher gives them.

    Nor may a launcher know of all: of processes that its own process spawned, each has inherited its number.
    """
    if isinstance(config, AgentConfig) and not config.model_fields_set.isdisjoint(("rank", "world_size")):
        return {}
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return {}
    given = {name.lower(): value for name, value in os.environ.items()}
    numbered = not given.keys().isdisjoint(("rank", "world_size", "foreshock_rank", "foreshock_world_size"))
    known = max((int(n) for key in _SIZES if (n := given.get(key, "")).isdecimal()), default=1)
    world = torch.distributed.get_world_size()
    return {} if numbered and known >= world else {"rank": torch.distributed.get_rank(), "world_size": world}


def _find(model: nn.Module, settings: AgentConfig) -> tuple[list[Found], str]:
    """What may be attention in the model, and why nothing of it can be watched; "" where the first step shows it."""
    if isinstance(model, nn.DataParallel):
        return [], "nn.DataParallel runs copies of the model in threads; use DistributedDataParallel, with torchrun"
    if any(parameter.is_meta for parameter in model.parameters()):
        return [], "the model is on the meta device, without numbers; attach when its weights have a device"
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            return [], f"{name or 'the model'} is compiled already; attach first, then compile"
    found = find_attention(model, settings.heads)
    watched = sum(f.problem is None for f in found)
    if watched > MAX_LAYERS:
        return [], f"{watched} attention layers were found; at most {MAX_LAYERS} can be watched"
    return found, ""


def _refuse_unknown_names(model: nn.Module, settings: AgentConfig) -> None:
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for setting, by_name in (("heads", settings.heads), ("layers", settings.layers)):
        for unknown in by_name.keys() - names:
            near = difflib.get_close_matches(unknown, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "; report() of an agent without it lists them"
            raise ValueError(f"{setting} names {unknown[:100]!r}, which is no module of the model{hint}")


_installing: Final = threading.RLock()
"""A dropped agent leaves in a thread of its own, perhaps while another one is attached."""


def _install(
    model: nn.Module,
    watched: list[tuple[nn.Module, LayoutCheck]],
    selector: BackendSelector,
    finder: UnwatchedAttentionFinder,
) -> Callable[[], None]:
    with _installing, ExitStack() as undo:  # each undoing is done, whatever becomes of the others
        for one in (selector.stop, finder.stop, leave_no_copies):
            undo.callback(one)
        for (module, check), layer in zip(watched, selector.layers, strict=True):
            undo.callback(watch_module(module, layer))
            undo.callback(check.stop)
            check.start()
        if "transformers.modeling_utils" in sys.modules:
            from foreshock.monitor.attention import transformers_attention

            undo.callback(transformers_attention.watch_dispatch())
            models = transformers_attention.models_inside(model)
            inside = {id(module) for one in models for module in one.modules()}
            mask_makers = [
                one for (module, _), one in zip(watched, selector.layers, strict=True) if id(module) in inside
            ]
            leave_out = functools.partial(transformers_attention.watch_positions, models)
            selector.masks_can_be_left_out(mask_makers, leave_out)
        sdpa_rebinding.acquire()
        undo.callback(sdpa_rebinding.release)
        installed = undo.pop_all()

    def take_out() -> None:
        with _installing:
            installed.close()

    return take_out


def _some_weights(watched: list[Found]) -> tuple[weakref.ref[Tensor], ...]:
    ends = [*watched[:1], *watched[1:][-1:]]
    return tuple(weakref.ref(each) for f in ends for each in f.module.parameters() if not each.is_inference())


def _described(watched: list[Found], settings: AgentConfig, ours: str) -> tuple[Layer, ...]:
    """The layers as the service gets them; `ours`: which of our kernels compute them, where they do."""
    sampled = settings.attention != "kernels"
    layers: dict[int, Layer] = {}
    for index, f in enumerate(watched):
        name, number = f.name or "model", settings.layers.get(f.name, settings.first_layer + index)
        first_head = settings.first_head + f.first_head
        if number in layers:
            raise ValueError(
                f"{layers[number].name} and {name} both have the layer number {number}; give every attention module a "
                "number of its own: layers={name: number}"
            )
        try:
            layers[number] = Layer(
                layer=number,
                name=re.sub(r"[^\w.:/-]", "_", name, flags=re.ASCII)[-128:],  # a key of nn.ModuleDict may be any text
                heads=tuple(range(first_head, first_head + f.heads)),
                kv_heads=f.kv_heads or f.heads,  # older services take no less than one
                kv_heads_known=f.kv_heads > 0,
                head_dim=f.head_dim,
                served_by="probe" if sampled else ours,
                sampled=sampled,
            )
        except ValidationError as error:
            raise ValueError(f"{name} cannot be watched: {first_error(error)}") from None
    return tuple(layers.values())


def _report(settings: AgentConfig, found: list[Found], selector: BackendSelector, ours: str) -> str:
    """The table of what was found; what is not watched is warned of."""
    if not found:
        return ""
    watched = any(f.problem is None for f in found)
    for names, why in _problems(found) if watched else ():
        logger.warning("foreshock: the attention of %s is not watched: %s", names, why)
    for f in found:
        if f.also and f.problem is None:
            same = ", ".join(f.also)
            logger.warning("foreshock: %s is the same module as %s; their rows count into one layer", same, f.name)
    now = "native attention, sampled" if settings.attention != "kernels" else ours
    numerics = _NUMERICS.get(settings.numerics, settings.numerics)
    return f"{table_of(found, now)}\nnumerics: {numerics}\n{selector.describe()}"


def _problems(found: list[Found]) -> list[tuple[str, str]]:
    """The modules that cannot be watched, those of one problem together, and the problem of the first of them."""
    groups: dict[str, list[Found]] = {}
    for f in found:
        if f.problem is not None:
            groups.setdefault(f.problem.replace(f'"{f.name}"', '""'), []).append(f)
    return [(", ".join(f.name or "the model" for f in alike), str(alike[0].problem)) for alike in groups.values()]


_NUMERICS: Final = {"auto": "auto (kernel for 16-bit operands, float32 for fp32, float64 for float64)"}
