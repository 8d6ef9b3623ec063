"""Attaching to models that call F.scaled_dot_product_attention: what is found, counted, refused and given back."""

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor import tiny_models
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from tests.monitor.tiny_models import (
    AttentionByName,
    AttentionWithMask,
    CausalSelfAttention,
    GroupedQueryAttention,
    OuterAttention,
    tiny_gpt,
    train_step,
)
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from foreshock.contract import wire
from foreshock.contract.slots import SLOT_COUNT, Slot, slot_values
from foreshock.kernels.flash_attention import flash_attention
from foreshock.monitor import Agent, attach
from foreshock.monitor.attention import interception, watched_layer


def watch(model: nn.Module, steps: int = 2, **overrides: Any) -> tuple[Agent, Listener]:
    """Attach, train, close; returns the agent and everything it said."""
    agent = attach(model, **{**EVERY_STEP, **overrides})
    listener = Listener()
    agent.subscribe(listener)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        agent.step(train_step(model, optimizer, step))
    agent.close()
    return agent, listener


def rows_of(listener: Listener) -> list[int]:
    """Rows counted per head over all samples."""
    return np.sum([slot_values(s.words(), Slot.ROWS) for s in listener.of(wire.Sample)], axis=0).astype(int).tolist()  # type: ignore[no-any-return]


def test_every_row_of_every_head_is_counted_and_samples_tile_the_steps() -> None:
    _, listener = watch(tiny_gpt(), steps=3)
    samples = listener.of(wire.Sample)
    assert [(s.since_step, s.step) for s in samples] == [(0, 1), (1, 2), (2, 3)]
    assert rows_of(listener) == [3 * 2 * 12] * 4
    assert [type(e) for e in listener.events[:1] + listener.events[-1:]] == [wire.Started, wire.Finished]


def test_the_loss_of_each_sample_is_the_mean_of_its_steps() -> None:
    model, losses = tiny_gpt(), []
    agent = attach(model, **{**EVERY_STEP, "sample_every_steps": 4})
    listener = Listener()
    agent.subscribe(listener)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        losses.append(train_step(model, optimizer, step))
        agent.step(losses[-1], grad_norm=float(step), learning_rate=0.1)
    agent.close()
    first, second = listener.of(wire.Sample)
    assert first.loss == pytest.approx(losses[0].item(), rel=1e-6)
    assert second.loss == pytest.approx(torch.stack(losses[1:]).double().mean().item(), rel=1e-6)
    assert second.loss_max == pytest.approx(max(x.item() for x in losses[1:]), rel=1e-6)
    assert (second.grad_norm, second.learning_rate) == (3.0, 0.1)


def test_statistics_equal_brute_force_on_the_tensors_that_were_received(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[tuple[Tensor, Tensor]] = []

    def record(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        received.append((query.detach().clone(), key.detach().clone()))
        return flash_attention(query, key, value, **options)

    monkeypatch.setattr(watched_layer, "flash_attention", record)
    _, listener = watch(tiny_gpt(), steps=1, numerics="kernel")
    words = listener.of(wire.Sample)[0].words()
    for layer, (query, key) in enumerate(received):
        for head in range(2):
            counted = words[2 * layer + head]
            scores = [
                [float(q @ k) * query.shape[-1] ** -0.5 for k in key[b, head].bfloat16().double()[: i + 1]]
                for b in range(query.shape[0])
                for i, q in enumerate(query[b, head].bfloat16().double())
            ]
            offsets = [float(np.logaddexp.reduce(row) - np.log(len(row))) for row in scores]
            assert counted[Slot.ROWS] == len(scores)
            assert slot_values(counted, Slot.SCORE_MAX) == pytest.approx(max(map(max, scores)), rel=1e-5)
            assert slot_values(counted, Slot.ROW_MAX_ABS) == pytest.approx(max(abs(max(r)) for r in scores), rel=1e-5)
            assert slot_values(counted, Slot.SCORE_OFFSET_SUM) == pytest.approx(sum(offsets), abs=1e-4)
            assert slot_values(counted, Slot.SCORE_OFFSET_SUMSQ) == pytest.approx(sum(o * o for o in offsets), rel=1e-4)


class AttentionWithOurOperator(CausalSelfAttention):
    """Calls the same operator directly, with no agent."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = flash_attention(query, key, value, causal="top_left", numerics="kernel")
        assert isinstance(out, Tensor)
        return out


@pytest.mark.promise("A14")
def test_loss_and_weights_are_equal_bit_for_bit_with_and_without_the_agent() -> None:
    def train(model: nn.Module, agent: Agent | None) -> tuple[list[Tensor], list[Tensor]]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(4):
            losses.append(train_step(model, optimizer, step).detach())
            if agent is not None:
                agent.step(losses[-1])
        return losses, list(model.parameters())

    torch.manual_seed(1)
    alone = tiny_gpt(AttentionWithOurOperator(16, 2), AttentionWithOurOperator(16, 2))
    torch.manual_seed(1)
    watched = tiny_gpt(CausalSelfAttention(16, 2), CausalSelfAttention(16, 2))
    agent = attach(watched, **EVERY_STEP, numerics="kernel")
    expected, got = train(alone, None), train(watched, agent)
    agent.close()
    for a, b in zip(expected[0] + expected[1], got[0] + got[1], strict=True):
        assert torch.equal(a, b)


def test_detach_gives_the_model_and_pytorch_back_as_they_were() -> None:
    original = F.scaled_dot_product_attention
    model = tiny_gpt(AttentionByName(16, 2), CausalSelfAttention(16, 2))
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    agent = attach(model, **EVERY_STEP)
    assert F.scaled_dot_product_attention is not original
    agent.detach()
    agent.detach()
    assert F.scaled_dot_product_attention is original
    assert vars(tiny_models)["sdpa_by_name"] is original
    assert {name: vars(module) for name, module in model.named_modules()} == before


def test_a_function_imported_by_name_is_watched_too() -> None:
    _, listener = watch(tiny_gpt(AttentionByName(16, 4)), steps=1)
    assert rows_of(listener) == [24] * 4


def test_grouped_queries_are_watched_per_query_head() -> None:
    agent, listener = watch(tiny_gpt(GroupedQueryAttention(16, 4, 2)), steps=1)
    assert rows_of(listener) == [24] * 4
    assert listener.of(wire.Started)[0].layers[0].kv_heads == 2
    assert "separate (wq, wk)" in agent.report()


def test_an_inner_module_takes_heads_and_weights_from_the_module_round_it() -> None:
    agent, listener = watch(tiny_gpt(OuterAttention(16, 2)), steps=1)
    assert rows_of(listener) == [24] * 2
    assert "blocks.0.inner" in agent.report()
    assert "c_attn" in agent.report()


def test_torch_transformer_layers_are_watched() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=16, batch_first=True, dropout=0.0)
    _, listener = watch(tiny_gpt(layer), steps=1)
    assert rows_of(listener) == [24] * 2


def test_evaluation_counts_nothing_and_accumulated_micro_batches_add_up() -> None:
    model = tiny_gpt()
    agent = attach(model, **EVERY_STEP)
    listener = Listener()
    agent.subscribe(listener)
    with torch.no_grad():
        model(tiny_models.batch(0))
    for step in range(2):
        ids = tiny_models.batch(step)
        torch.autograd.backward(F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))
    agent.step()
    agent.close()
    assert rows_of(listener) == [2 * 24] * 4


def test_a_compiled_model_counts_on_the_right_layers() -> None:
    expected = watch(tiny_gpt(), steps=2)[1].of(wire.Sample)
    model = tiny_gpt()
    agent = attach(model, **EVERY_STEP)
    listener = Listener()
    agent.subscribe(listener)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        agent.step(train_step(compiled, optimizer, step))
    agent.close()
    torch._dynamo.reset()
    for a, b in zip(expected, listener.of(wire.Sample), strict=True):
        np.testing.assert_array_equal(a.words(), b.words())


class AttentionThroughAHelper(CausalSelfAttention):
    """Calls PyTorch's attention two functions away from its forward."""

    def forward(self, x: Tensor) -> Tensor:
        heads = (t.unflatten(2, (self.n_head, -1)).transpose(1, 2) for t in self.c_attn(x).split(x.shape[2], dim=2))
        out: Tensor = self.c_proj(tiny_attention(*heads).transpose(1, 2).flatten(2))
        return out


def tiny_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return tiny_attention_of(query, key, value, causal=True)


def tiny_attention_of(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal)


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("attention", ["keep", pytest.param("kernels", marks=pytest.mark.full)])
def test_attention_through_a_helper_counts_every_row_under_torch_compile(attention: Any) -> None:
    model = tiny_gpt(AttentionThroughAHelper(16, 2))
    agent = attach(model, **{**EVERY_STEP, "attention": attention, "probe_rows": 10**6, "probe_every_steps": 1})
    agent.subscribe(listener := Listener())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        agent.step(train_step(compiled, optimizer, step))
    agent.close()
    torch._dynamo.reset()
    expected = watch(tiny_gpt(CausalSelfAttention(16, 2)), attention="kernels")[1]
    assert rows_of(listener) == rows_of(expected)
    assert min(rows_of(listener)) > 0


def test_a_copied_model_is_independent_and_brings_no_counts() -> None:
    model = tiny_gpt()
    agent = attach(model, **EVERY_STEP)
    average = copy.deepcopy(model)
    with torch.no_grad():
        average.head.weight.zero_()
        average.get_parameter("blocks.0.c_proj.weight").fill_(1.0)
        assert not torch.equal(average(tiny_models.batch(0)), model(tiny_models.batch(0)))
    agent.close()


def test_a_call_with_a_mask_keeps_pytorchs_attention_and_is_measured() -> None:
    torch.manual_seed(5)
    masked = tiny_gpt(AttentionWithMask(16, 2), CausalSelfAttention(16, 2))
    agent, listener = watch(masked, steps=3, probe_every_steps=1, probe_rows=7)
    assert rows_of(listener) == [21, 21, 72, 72]
    assert "blocks.0" in agent.report()


def test_calls_outside_every_watched_module_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_gpt()
    agent = attach(model, **EVERY_STEP)
    x = torch.randn(1, 2, 4, 8)
    F.scaled_dot_product_attention(x, x, x)
    with caplog.at_level(logging.WARNING, "foreshock"):
        agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0))
    agent.close()
    assert any("outside every watched module" in r.message for r in caplog.records)


class SilentAttention(CausalSelfAttention):
    """Tells nobody how many heads it has."""

    def __init__(self) -> None:
        super().__init__(16, 2)
        self.parts = self.n_head
        del self.n_head

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["n_head"] = self.parts
        try:
            return super().forward(x)
        finally:
            del self.__dict__["n_head"]


def test_a_module_that_does_not_tell_its_heads_is_named_and_can_be_told(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_gpt(SilentAttention(), CausalSelfAttention(16, 2))
    with caplog.at_level(logging.WARNING, "foreshock"):
        agent, listener = watch(model, steps=1)
    assert any('heads={"blocks.0": number of heads}' in r.message for r in caplog.records)
    assert "NOTHING" in agent.report()
    assert rows_of(listener) == [24, 24]
    _, told = watch(model, steps=1, heads={"blocks.0": 2})
    assert rows_of(told) == [24] * 4


@pytest.mark.parametrize(
    ("make", "overrides", "sentence"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), {}, "no attention was found in Sequential"),
        (lambda: torch.compile(tiny_gpt(), backend="aot_eager"), {}, "compiled already; attach first, then compile"),
        (lambda: nn.DataParallel(tiny_gpt()), {}, "use DistributedDataParallel"),
        (lambda: "gpt2", {}, "attach takes a torch.nn.Module, got str"),
        (tiny_gpt, {"numerics": "fp8"}, "numerics: Input should be 'auto', 'kernel', 'float32', 'paper' or 'float64'"),
        (tiny_gpt, {"mitigation": "prayer"}, "mode 'prayer' does not exist; allowed are plain, exact_delta"),
        (tiny_gpt, {"sample_evry": 3}, "sample_evry is not a setting of the agent"),
        (tiny_gpt, {"url": "localhost:80"}, "url must start with http:// or https://"),
        (tiny_gpt, {"url": "http://me:secret@host"}, "url must carry no user name or password"),
        (tiny_gpt, {"run": "two words"}, "is not an identifier"),
        (tiny_gpt, {"rank": 3}, "rank 3 needs a world_size of at least 4"),
        (tiny_gpt, {"world_size": 4}, "4 processes need one name for their run"),
    ],
)
def test_a_mistake_of_configuration_is_a_sentence_before_step_1(
    make: Any, overrides: dict[str, Any], sentence: str
) -> None:
    original = F.scaled_dot_product_attention
    with pytest.raises(ValueError, match=r".") as caught:
        attach(make(), **overrides)
    assert sentence in str(caught.value)
    assert "secret" not in str(caught.value)
    assert F.scaled_dot_product_attention is original


def test_a_second_agent_on_the_same_model_is_refused_and_the_first_goes_on() -> None:
    model = tiny_gpt()
    agent = attach(model, **EVERY_STEP)
    with pytest.raises(ValueError, match="watched by another agent; detach that one first"):
        attach(model, **EVERY_STEP)
    agent.detach()
    attach(model, **EVERY_STEP).close()


def test_two_models_are_watched_side_by_side() -> None:
    first, second = tiny_gpt(), tiny_gpt(seed=1)
    agents = [attach(m, **EVERY_STEP) for m in (first, second)]
    listeners = [Listener(), Listener()]
    for model, agent, listener in zip((first, second), agents, listeners, strict=True):
        agent.subscribe(listener)
        agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0))
    agents[0].close()
    assert F.scaled_dot_product_attention is interception.scaled_dot_product_attention
    agents[1].close()
    assert [rows_of(listener) for listener in listeners] == [[24] * 4] * 2


def test_the_table_says_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    attach(tiny_gpt(), **{**EVERY_STEP, "quiet": False}).close()
    table = capsys.readouterr().err
    assert "blocks.1" in table
    assert "fused Q, K, V (c_attn, Linear)" in table


def test_like_layers_share_a_line_of_the_table_and_unlike_ones_do_not() -> None:
    alike = [CausalSelfAttention(16, 2) for _ in range(9)]
    agent = attach(
        tiny_gpt(*alike[:3], CausalSelfAttention(16, 4), *alike[3:], SilentAttention(), SilentAttention()), **EVERY_STEP
    )
    agent.close()
    lines = [" ".join(line.split()) for line in agent.report().splitlines()]
    assert [line.split(" fused")[0] for line in lines if "blocks" in line][:2] == [
        "0, 1, ..., 9 9 x blocks.0, blocks.1, ..., blocks.9 2 2 8",
        "3 blocks.3 4 4 4",
    ]
    assert [line.split(" norms")[0] for line in lines if "NOTHING" in line] == ["- 2 x blocks.10, blocks.11 ? ? ?"]
    longer = attach(tiny_gpt(*alike), **EVERY_STEP)
    longer.close()
    assert "0 to 8" in longer.report()


def test_global_numbers_are_used_where_a_rank_holds_a_part() -> None:
    _, listener = watch(tiny_gpt(), steps=1, first_layer=4, first_head=2)
    layers = listener.of(wire.Started)[0].layers
    assert [(layer.layer, layer.heads) for layer in layers] == [(4, (2, 3)), (5, (2, 3))]


class FlexAttention(CausalSelfAttention):
    """Calls an attention that foreshock cannot see."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Any = flex_attention(query, key, value)
        return out  # type: ignore[no-any-return]


def test_an_attention_of_another_make_is_named_and_the_others_are_watched(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "foreshock"):
        agent = attach(tiny_gpt(FlexAttention(16, 2), CausalSelfAttention(16, 2)), **EVERY_STEP)
        agent.close()
    assert list(agent.modes()) == [(0, 0), (0, 1)]
    told = [r.message for r in caplog.records]
    assert any("the attention of blocks.0 is not watched: it calls an attention of another" in t for t in told)
    with pytest.raises(ValueError, match=r"blocks\.0 cannot be watched: it calls an attention of another make"):
        attach(tiny_gpt(FlexAttention(16, 2)), **EVERY_STEP)


def test_layers_that_share_one_module_are_named_and_count_together(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    shared = CausalSelfAttention(16, 2)
    with caplog.at_level(logging.WARNING, "foreshock"):
        _, listener = watch(tiny_gpt(shared, shared), steps=1)
    assert rows_of(listener) == [2 * 24] * 2
    told = [r.message for r in caplog.records]
    assert "foreshock: blocks.1 is the same module as blocks.0; their rows count into one layer" in told


@pytest.mark.parametrize("head_dim", [12, 264])
def test_a_head_dim_that_no_kernel_serves_is_named_and_its_layer_is_kept(head_dim: int) -> None:
    """ "meta" stands in for the accelerator."""
    query = torch.empty(1, 2, 4, head_dim, device="meta", dtype=torch.bfloat16)
    layer = watched_layer.WatchedLayer(
        "h.0",
        torch.empty(2, SLOT_COUNT, dtype=torch.int64, device="meta"),
        torch.empty(2, dtype=torch.int32, device="meta"),
        "auto",
    )
    expected = f"its head dim is {head_dim}; the kernels serve multiples of 8 up to 256"
    assert layer.problem(query, query, query) == expected
    attach(tiny_gpt(CausalSelfAttention(2 * head_dim, 2)), **EVERY_STEP).close()  # the reference serves any


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"heads": {"blocks.O": 2}}, "heads names 'blocks.O', which is no module of the model; did you mean 'blocks."),
        ({"layers": {"block.1": 3}}, "layers names 'block.1', which is no module of the model; did you mean 'blocks."),
    ],
)
def test_a_name_of_no_module_is_a_sentence(overrides: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        attach(tiny_gpt(), **EVERY_STEP, **overrides)
    assert sentence in str(caught.value)


def test_a_model_on_the_meta_device_is_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="lies on the meta device, without numbers; attach when its weights have"):
        attach(tiny_gpt().to("meta"), **EVERY_STEP)


def test_a_layer_that_stops_counting_is_named_when_it_does_and_again_when_it_does_it_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_gpt()
    agent = attach(model, **EVERY_STEP)
    with agent, caplog.at_level(logging.WARNING, "foreshock"):
        for step, frozen in enumerate([False, False, True, True, False, True, False]):
            second: Any = model.blocks[1]
            second.core = (lambda q, k, v: v) if frozen else type(second).core.__get__(second)
            agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), step))
    told = [r.message for r in caplog.records if "counted nothing" in r.message]
    assert [t.split(" in ")[1].split(":")[0] for t in told] == ["step 3", "step 6"]
    assert all("layer 1 (blocks.1)" in t for t in told)


def test_the_table_after_the_first_steps_tells_what_is(capsys: pytest.CaptureFixture[str]) -> None:
    masked = tiny_gpt(AttentionWithMask(16, 2), CausalSelfAttention(16, 2), SilentAttention())
    agent = attach(masked, **{**EVERY_STEP, "quiet": False})
    assert "watched" not in capsys.readouterr().err.splitlines()[-1]
    with agent:
        for step in range(2):
            agent.step(train_step(masked, torch.optim.SGD(masked.parameters(), lr=0.1), step))
        told = capsys.readouterr().err
        assert "1 x kernels, but kept and sampled in calls where it passes a mask (blocks.0)" in told
        assert "1 x kernels (blocks.1)" in told
        assert told.rstrip().endswith("watched 2 of 3 attention layers")
        assert agent.report().count("watched 2 of 3 attention layers") == 1
