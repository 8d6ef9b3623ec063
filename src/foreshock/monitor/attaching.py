"""`attach`: find a model's attention, print a table of it, and watch it."""

import difflib
import os
import sys
import weakref
from typing import Final, Unpack

import torch
from torch import nn

from foreshock.contract.wire import MAX_LAYERS
from foreshock.monitor.agent import Agent
from foreshock.monitor.attached_model import AttachedModel
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE, is_watched
from foreshock.monitor.config import AgentConfig, AgentSettings, make_config
from foreshock.monitor.guard import logger
from foreshock.monitor.model.discovery import Found, find_attention


def attach(model: nn.Module, config: AgentConfig | None = None, **overrides: Unpack[AgentSettings]) -> Agent:
    """Watch every attention layer of `model` without changing its results; `Agent.detach` removes everything again.

    Call it after moving the model to its device and before torch.compile. The first step shows which modules compute
    attention; the agent then prints a table of them to standard error, unless `quiet`. For the measured quantities, and
    why they predict an explosion, see arXiv 2510.04212, section 3.

    model: any module that contains attention, whole or a shard of it (DDP, FSDP2, tensor or pipeline parallel).
    config: the settings; by default, they come from the variables FORESHOCK_*.
    overrides: fields of AgentConfig, such as `run`, `url`, `policy` and `attention`. They take precedence over `config`
    and variables.

    Returns the agent: call `step` after every optimizer step, and `close` at the end, or use it in a `with` statement.
    Keep a reference to it; an agent that is garbage-collected is closed.
    If no attention can be watched, the log says why, and the agent continues with loss and gradient norm. With
    `strict`, QK-Clip or a policy that switches heads, ValueError is raised instead, by `attach` (a compiled model,
    `nn.DataParallel`) or by the first `Agent.step`. Raises ValueError with a sentence for a wrong setting.
    """
    settings = make_config(config, {**_place(config), **overrides})
    if not isinstance(model, nn.Module):
        raise ValueError(f"attach takes a torch.nn.Module, got {type(model).__name__}")
    if hasattr(sys, "ps1"):  # interactive Python or IPython, where a cell may run again
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
    attached = AttachedModel(model, settings, found, unfit=unfit)
    try:
        agent = Agent(settings, attached)
    except BaseException:
        attached.leave()
        raise
    _agents.add(agent)
    return agent


_agents: Final[weakref.WeakSet[Agent]] = weakref.WeakSet()


def detach(model: nn.Module) -> None:
    """Close every agent that watches a module of `model`, which is then as before `attach`.

    Use it if you do not have the agent that `attach` returned. The service then shows the run as stopped. Does nothing
    if the model is not watched.
    """
    layers = {vars(module)[LAYER_ATTRIBUTE] for module in model.modules() if is_watched(module)}
    for agent in list(_agents):
        if not layers.isdisjoint(agent._attached.watched):
            agent.close("stopped")


def _close_former(model: nn.Module, settings: AgentConfig) -> None:
    """Close the agent of this model and the agent of this run.

    IPython keeps references to the outputs of cells, so an old agent would continue as a second process of its rank.
    """
    of_model = {vars(module).get(LAYER_ATTRIBUTE) for module in model.modules()}
    for agent in list(_agents):
        same_run = settings.run and (agent.run, agent.config.rank) == (settings.run, settings.rank)
        if not agent._closed and (same_run or not of_model.isdisjoint(agent._attached.watched)):
            agent.close("stopped")
            logger.warning("foreshock: the agent of run %s was closed; a new one takes its place", agent.run)


_SIZES: Final = ("world_size", "foreshock_world_size")


def _place(config: AgentConfig | None) -> dict[str, int]:
    """Return rank and world size from torch.distributed, if neither the user nor the launcher sets them.

    They are also returned if the launcher's world size is too small: processes that a launched process spawned inherit
    its variables.
    """
    if isinstance(config, AgentConfig) and not config.model_fields_set.isdisjoint(("rank", "world_size")):
        return {}
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return {}
    given = {name.lower(): value for name, value in os.environ.items()}
    known = max((int(n) for key in _SIZES if (n := given.get(key, "")).isdecimal()), default=1)
    world = torch.distributed.get_world_size()
    return {} if known >= world else {"rank": torch.distributed.get_rank(), "world_size": world}


def _find(model: nn.Module, settings: AgentConfig) -> tuple[list[Found], str]:
    """Return modules that may be attention, and why none can be watched; "" if the first step has to show it."""
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
    first_layer = settings.first_layer if isinstance(settings.first_layer, dict) else {}
    for setting, by_name in (("heads", settings.heads), ("first_layer", first_layer)):
        for unknown in by_name.keys() - names:
            near = difflib.get_close_matches(unknown, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "; report() of an agent without it lists them"
            raise ValueError(f"{setting} names {unknown[:100]!r}, which is not a module of the model{hint}")
