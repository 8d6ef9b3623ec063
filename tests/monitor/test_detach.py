"""After detach everything is as it was before attach: every module, and every name of PyTorch and transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from tests.monitor.executions import EVERY_STEP
from tests.monitor.test_executions import MODELS, Mode, encoder_layer
from tests.monitor.test_huggingface import MODELS as TRANSFORMERS
from tests.monitor.tiny_models import batch, next_token_loss, tiny_gpt
from torch import nn
from torch.nn.attention import varlen
from transformers import masking_utils, modeling_utils

from foreshock.monitor import attach

MAKERS: dict[str, Callable[[], nn.Module]] = {
    **{name: (lambda make=make: make(Mode())) for name, (make, _, _) in MODELS.items()},  # type: ignore[misc]
    **TRANSFORMERS,
}
PLACES: list[Any] = [F, varlen, torch.utils.checkpoint, torch.nn.utils, masking_utils, modeling_utils]


def snapshot(model: nn.Module) -> Any:
    """Everything that attach may touch; dictionaries (hooks, say) by their contents, not by themselves."""
    modules = {
        name: {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }
    names = {place.__name__: dict(vars(place)) for place in PLACES}
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return modules, names, torch._dynamo.config.get_config_copy(), implementation, type(model).__mro__


@pytest.mark.parametrize("attention", ["auto", "kernels", "keep"])
@pytest.mark.parametrize("name", MAKERS)
def test_detach_gives_everything_back_as_it_was(name: str, attention: Any) -> None:
    torch.manual_seed(0)
    model = MAKERS[name]()
    before = snapshot(model)
    agent = attach(model, **{**EVERY_STEP, "attention": attention})
    assert snapshot(model) != before
    out = model(batch(0))
    torch.autograd.backward(next_token_loss(getattr(out, "logits", out), batch(0)))
    agent.step(1.0)
    agent.close()
    model.zero_grad(set_to_none=True)
    for mine, theirs in zip(snapshot(model), before, strict=True):
        assert mine == theirs


@pytest.mark.execution("torch TransformerEncoder", "eager")
def test_torchs_fast_path_in_evaluation_is_left_as_it_is_and_training_after_it_counts() -> None:
    torch.manual_seed(0)
    model = tiny_gpt(encoder_layer(), encoder_layer()).eval()
    with torch.no_grad():
        expected = model(batch(0))
    agent = attach(model, **EVERY_STEP)
    events: list[Any] = []
    agent.subscribe(events.append)
    with torch.no_grad():
        got = model(batch(0))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    model.train()
    torch.autograd.backward(next_token_loss(model(batch(0)), batch(0)))
    agent.step(1.0)
    agent.close()
    samples = [event for event in events if event.kind == "sample"]
    assert [sample.words()[:, 0].tolist() for sample in samples] == [[24] * 4]
