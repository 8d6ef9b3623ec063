"""Layers that are dropped at random, trained later, added or replaced: the table and the log follow them."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from tests.monitor.tiny_models import CausalSelfAttention, tiny_gpt, train_step
from tests.monitor.unusual_attention import ByHand
from torch import Tensor

from foreshock.contract import wire
from foreshock.monitor import attach

STEPS = 24


def trained(model: Any, inputs: Tensor, steps: int = STEPS) -> tuple[str, list[str]]:
    """The report after some steps, and each line of the log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("foreshock").addHandler(handler)
    try:
        with attach(model, **EVERY_STEP) as agent:
            for _ in range(steps):
                out = model(inputs)
                loss = (out if isinstance(out, Tensor) else out.last_hidden_state).square().mean()
                torch.autograd.backward(loss)
                agent.step(loss)
            return agent.report(), lines
    finally:
        logging.getLogger("foreshock").removeHandler(handler)


@pytest.mark.promise("A24")
def test_a_wav2vec2_that_drops_half_its_layers_ends_with_all_of_them_watched_and_few_words() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, layerdrop=0.5,
        conv_dim=(8,), conv_stride=(4,),
        conv_kernel=(4,), num_feat_extract_layers=1, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
    )  # fmt: skip
    report, lines = trained(transformers.Wav2Vec2Model(config).train(), torch.randn(2, 64))
    assert "watched 3 of 3 attention layers" in report
    assert len([line for line in lines if "counted nothing" in line]) <= 8


@pytest.mark.promise("A24")
def test_attention_that_is_unfrozen_in_the_middle_stands_in_a_new_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_gpt()
    model.embedding.requires_grad_(False)
    model.blocks.requires_grad_(False)
    with attach(model, **{**EVERY_STEP, "quiet": False}) as agent:
        for step in range(4):
            if step == 2:
                model.blocks.requires_grad_(True)
            agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), step))
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("watched ")]
    assert told == ["watched 0 of 2 attention layers", "watched 2 of 2 attention layers"]


@pytest.mark.promise("A24")
@pytest.mark.parametrize("replaced", [False, True])
def test_attention_that_is_added_or_replaced_after_attach_is_named_and_counted_among_what_is_not_watched(
    replaced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_gpt()
    with attach(model, **EVERY_STEP) as agent:
        for step in range(8):
            if step == 3 and replaced:
                model.blocks[1] = CausalSelfAttention(16, 2)
            elif step == 3:
                model.blocks.append(CausalSelfAttention(16, 2))
            agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), step))
    name = "blocks.1" if replaced else "blocks.2"
    told = [r.getMessage() for r in caplog.records if "is not watched" in r.getMessage()]
    assert told == [
        f"foreshock: the attention of {name} is not watched: it was added after attach; close the agent and attach "
        "again to watch it"
    ]
    assert f"watched {1 if replaced else 2} of {2 if replaced else 3} attention layers" in agent.report().splitlines()


@pytest.mark.promise("A23")
def test_the_norms_of_a_layer_are_unknown_while_another_module_stands_in_its_place() -> None:
    model, listener = tiny_gpt(), Listener()
    own = model.blocks[1]
    with attach(model, **EVERY_STEP, norms_every_steps=1) as agent:
        agent.subscribe(listener)
        for step, there in enumerate([own, CausalSelfAttention(16, 2), torch.nn.Identity(), own, own]):
            if there is not model.blocks[1]:
                model.blocks[1] = there
            agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), step))
            if there is not own:
                assert "1 x W_Q and W_K (blocks.1): norms unknown: its module was taken out" in agent.report()
    norms = [sample.query_norm.numpy() for sample in listener.of(wire.Sample)]
    known = [np.isfinite(each).reshape(2, 2).all(axis=1).tolist() for each in norms]
    assert known == [[True, True], [True, False], [True, False], [True, True], [True, True]]


@pytest.mark.promise("A24")
def test_attention_by_hand_that_is_added_under_any_name_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_gpt()
    with attach(model, **EVERY_STEP) as agent:
        for step in range(8):
            if step == 5:
                model.blocks.append(ByHand())
            agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), step))
    assert "the attention of blocks.2 is not watched: it computes its attention by hand" in caplog.text
    assert agent.report().endswith("watched 2 of 3 attention layers")
