"""Attention of libraries, by stand-ins with their signatures: kept to the last bit, and measured as PyTorch's own."""

import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.executions import EVERY_STEP, STEPS, Mode, Trained, unwatched, watched
from tests.monitor.library_calls import (
    BOUNDS,
    CALLS,
    FOUR,
    KEPT,
    PACKED,
    SLOPES,
    THREE,
    TWO,
    Call,
    Grouped,
    alone,
    assert_alike,
    flat,
    masked,
    model_of,
    of_pytorch,
    wide,
)
from tests.monitor.stand_ins import (
    flash_attn_2,
    flash_attn_3,
    flash_attn_4,
    transformer_engine,
)
from tests.monitor.stand_ins.flash_attn_2 import flash_attn_func as imported_by_name
from tests.monitor.tiny_models import tiny_gpt
from tests.monitor.transformers_models import DECODER, TRANSFORMERS, tiny
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import modeling_flash_attention_utils as flash

from foreshock.monitor import attach
from foreshock.monitor.model.discovery import find_attention

LIBRARIES = (flash_attn_2, flash_attn_3, flash_attn_4)


@pytest.fixture(autouse=True)
def _libraries_are_as_they_were() -> Iterator[None]:
    before = [dict(vars(each)) for each in (*LIBRARIES, Engine)]
    yield
    assert [dict(vars(each)) for each in (*LIBRARIES, Engine)] == before


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_a_library_is_kept_to_the_last_bit_and_measured_as_pytorchs_own(name: str) -> None:
    call, rule = CALLS[name]
    got = watched(model_of(call), Mode().loop, **KEPT)
    got.assert_same_bits(alone(call))
    assert got.rows == [2 * 12 * STEPS] * 8
    assert_alike(got, watched(model_of(of_pytorch(rule)), Mode().loop, **KEPT))


def capped(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return TWO.flash_attn_func(query, key, value, causal=True, softcap=0.5)


@pytest.mark.parametrize("call", [CALLS["2"][0], CALLS["2, packed kv"][0], capped], ids=["2", "2, packed kv", "capped"])
def test_our_kernels_serve_a_call_and_count_what_is_measured_of_it_where_it_is_kept(call: Call) -> None:
    got = watched(model_of(call), Mode().loop, attention="kernels")
    expected = alone(call)
    got.assert_near(expected, rtol=1e-5, atol=1e-6)
    assert "2 x kernels" in got.report
    kept = watched(model_of(call), Mode().loop, **KEPT)
    kept.assert_same_bits(expected)
    assert_alike(kept, got)


def test_a_call_that_returns_more_than_its_output_stays_and_a_switch_of_it_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    call, _ = CALLS["2, log-sum-exp too"]
    model = model_of(call)
    with caplog.at_level(logging.INFO, "foreshock"):
        got = watched(model, Mode().loop, attention="kernels", probe_rows=10**6)
    got.assert_same_bits(alone(call))
    assert got.rows == [2 * 12 * STEPS] * 8
    assert "returns more than the output, which our kernels do not" in caplog.text


def by_name(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return imported_by_name(query, key, value, causal=True)  # type: ignore[no-any-return]


def when_it_runs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from tests.monitor.stand_ins.flash_attn_2 import flash_attn_func

    return flash_attn_func(query, key, value, causal=True)  # type: ignore[no-any-return]


TABLE = {"flash": functools.partial(imported_by_name, causal=True)}
REACHED: dict[str, Call] = {
    "by name": by_name,
    "imported when it runs": when_it_runs,
    "kept in a partial": functools.partial(imported_by_name, causal=True),
    "kept in a table": lambda q, k, v: TABLE["flash"](q, k, v),
    "in a checkpoint": lambda *operands: checkpoint(by_name, *operands, use_reentrant=False),
    "in a reentrant checkpoint": lambda *operands: checkpoint(by_name, *operands, use_reentrant=True),
}


@pytest.mark.parametrize("way", REACHED)
def test_a_library_is_met_however_its_function_is_reached(way: str) -> None:
    call = REACHED[way]
    assert [found.problem for found in find_attention(model_of(call), {})] == [None] * 2
    got = watched(model_of(call), Mode().loop, **KEPT)
    got.assert_same_bits(alone(by_name))
    assert got.rows == [2 * 12 * STEPS] * 8


def keys_that_are_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A call of PyTorch's own."""
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True).transpose(1, 2)


COMPILED = {
    "flash_attn": CALLS["2"][0],
    "packed": CALLS["2, packed"][0],
    "packed, by the same ends": CALLS["2, packed qkv"][0],
    "keys that are values": keys_that_are_values,
}


@pytest.mark.full
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_model_stays_one_graph_and_is_measured_as_an_eager_one(name: str) -> None:
    call = COMPILED[name]
    mode = Mode(compile={"backend": "aot_eager", "fullgraph": True})
    got = watched(model_of(call), mode.loop, **KEPT)
    got.assert_same_bits(alone(call, mode))
    assert_alike(got, watched(model_of(call), Mode().loop, **KEPT))


def test_a_library_that_is_imported_after_attach_is_met_from_the_next_step_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from flash_attn_interface import flash_attn_func  # type: ignore[import-not-found]

        return flash_attn_func(query, key, value, causal=True)  # type: ignore[no-any-return]

    (tmp_path / "flash_attn_interface.py").write_text(Path(flash_attn_2.__file__).read_text())
    monkeypatch.syspath_prepend(tmp_path)
    try:
        got = watched(model_of(call), Mode().loop, **KEPT)
        before = dict(vars(sys.modules["flash_attn_interface"]))
    finally:
        del sys.modules["flash_attn_interface"]
    assert got.rows == [2 * 12 * (STEPS - 1)] * 8
    assert issubclass(before["FlashAttnFunc"], torch.autograd.Function)
    got.assert_same_bits(alone(by_name))


def test_two_agents_and_their_end_in_any_order_leave_the_library_as_it_was_and_so_what_was_taken_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    importing = types.ModuleType("importing")
    monkeypatch.setitem(sys.modules, "importing", importing)
    for first, second in ((0, 1), (1, 0)):
        agents = [attach(model_of(by_name), **EVERY_STEP) for _ in range(2)]
        vars(importing)["taken"] = flash_attn_2.FlashAttnFunc
        assert not issubclass(flash_attn_2.FlashAttnFunc, torch.autograd.Function)
        agents[first].close()
        assert not issubclass(flash_attn_2.FlashAttnFunc, torch.autograd.Function)
        agents[second].close()
        assert issubclass(flash_attn_2.FlashAttnFunc, torch.autograd.Function)
        assert vars(importing)["taken"] is flash_attn_2.FlashAttnFunc


ROWS, LENGTH = 2, 12
BOTH_WAYS: Any = {**DECODER, "sliding_window": 6, "query_pre_attn_scalar": 8, "use_bidirectional_attention": True}
ENCODER: Any = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MAKERS: Any = TRANSFORMERS | {
    "gemma3, window to both sides": lambda: tiny("Gemma3Text", "Model", **BOTH_WAYS),
    "modernbert, window to both sides": lambda: tiny(
        "ModernBert", "ForMaskedLM", **ENCODER, local_attention=6, cls_token_id=1, sep_token_id=2
    ),
}


@pytest.fixture(autouse=True)
def _flash_attn_is_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    process = flash._lazy_define_process_function(flash_attn_2.flash_attn_varlen_func)
    for name, value in {
        "_loaded_implementation": "flash_attention_2",
        "_flash_fn": flash_attn_2.flash_attn_func,
        "_flash_varlen_fn": flash_attn_2.flash_attn_varlen_func,
        "_pad_fn": flash._pad_input,
        "_unpad_fn": flash._unpad_input,
        "_process_flash_kwargs_fn": process,
    }.items():
        monkeypatch.setattr(flash, name, value)


def inputs(kind: str, step: int) -> dict[str, Tensor]:
    """Whole rows, rows padded at the right, or one row of two sequences told by their positions."""
    ids = torch.randint(48, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    if kind == "packed":
        return {"input_ids": ids.view(1, -1), "position_ids": torch.arange(LENGTH).repeat(1, ROWS)}
    if kind == "padded":
        mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
        mask[1, 7:] = 0
        return {"input_ids": ids, "attention_mask": mask}
    return {"input_ids": ids}


def transformers_model(name: str, implementation: str) -> Any:
    torch.manual_seed(0)
    model = MAKERS[name]()
    model.config.use_cache = False
    model.config._attn_implementation_internal = implementation
    return model


def trained(name: str, kind: str, implementation: str = "flash_attention_2", **settings: Any) -> Trained:
    def loop(model: Any, stepped: Any) -> list[Tensor]:
        losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            given = inputs(kind, step)
            logits = model(**given)[0]
            real = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
            losses.append(logits[real].logsumexp(-1).square().mean())
            torch.autograd.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
            stepped(losses[-1].detach())
        return losses

    model = transformers_model(name, implementation)
    return watched(model, loop, **settings) if settings else unwatched(model, loop)


CASES = [
    ("Llama", "whole"),
    ("Llama", "padded"),
    ("Llama", "packed"),
    ("Mistral", "packed"),
    ("gemma3, window to both sides", "whole"),
    ("modernbert, window to both sides", "whole"),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_what_transformers_hands_to_flash_attn_is_kept_measured_row_by_row_and_served_alike(
    name: str, kind: str
) -> None:
    got, expected, served = trained(name, kind, **KEPT), trained(name, kind), trained(name, kind, attention="kernels")
    got.assert_same_bits(expected)
    real = ROWS * LENGTH - 5 * (kind == "padded")
    assert got.rows == [real * STEPS] * 8
    if kind != "padded":  # padded rows are no rows to flash_attn, and some to PyTorch's
        assert_alike(got, trained(name, kind, "sdpa", **KEPT))
    served.assert_near(expected, rtol=1e-4, atol=1e-5)
    assert "2 x kernels (" in served.report
    assert_alike(served, got)


def test_an_argument_that_is_for_flash_attn_alone_leaves_eager_attention_measured() -> None:
    name = "modernbert, window to both sides"  # it passes `deterministic` whatever computes its attention
    got = trained(name, "whole", "eager", **KEPT)
    assert got.rows == [ROWS * LENGTH * STEPS] * 8
    assert_alike(got, trained(name, "whole", **KEPT))


Engine = transformer_engine.DotProductAttention


class WithCore(Grouped):
    """Leaves its attention to a module of a library, and its shapes to `ask`."""

    def __init__(self, core: nn.Module, ask: Callable[..., Tensor]) -> None:
        super().__init__(lambda q, k, v: ask(self.core_attention, q, k, v))
        self.core_attention = core


def tokens_first(core: nn.Module, *operands: Tensor, **options: Any) -> Tensor:
    """Operands [S, B, H, D]."""
    out: Tensor = core(*(x.transpose(0, 1) for x in operands), **options)
    return out.transpose(0, 1).reshape(operands[0].shape)


def batch_first(core: nn.Module, *operands: Tensor, **options: Any) -> Tensor:
    out: Tensor = core(*operands, qkv_format="bshd", **options)
    return out.view(operands[0].shape)


def packed(core: nn.Module, *operands: Tensor, **options: Any) -> Tensor:
    ends = {"cu_seqlens_q": BOUNDS, "cu_seqlens_kv": BOUNDS, "max_seqlen_q": 12, "max_seqlen_kv": 12}
    out: Tensor = core(*(x.flatten(0, 1) for x in operands), qkv_format="thd", **ends, **options)
    return out.view(operands[0].shape)


def asked(ask: Callable[..., Tensor], *more: Any, **options: Any) -> Callable[..., Tensor]:
    return lambda core, *operands: ask(core, *operands, *more, **options)


Case = tuple[Callable[[], nn.Module], Callable[..., Tensor], dict[str, Any]]
MODULES: dict[str, Case] = {
    "engine": (lambda: Engine(4, 4, 2), tokens_first, {"causal": True}),
    "engine, of two processes": (lambda: Engine(8, 4, 4, tp_size=2), tokens_first, {"causal": True}),
    "engine, batch first": (lambda: Engine(4, 4, 2), asked(batch_first, attn_mask_type="no_mask"), {}),
    "engine, window": (lambda: Engine(4, 4, 2, window_size=(3, 0)), batch_first, {"causal": True, "window": (3, 0)}),
    "engine, packed": (
        lambda: Engine(4, 4, 2),
        asked(packed, attn_mask_type="padding_causal"),
        {"causal": True, "ends": BOUNDS},
    ),
}


def model_with(make: Callable[[], nn.Module], ask: Callable[..., Tensor]) -> nn.Module:
    torch.manual_seed(5)
    return tiny_gpt(*(WithCore(make(), ask) for _ in range(2)), seed=3)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_a_library_is_kept_to_the_last_bit_and_measured_as_pytorchs_own(name: str) -> None:
    make, ask, rule = MODULES[name]
    got, plain = watched(model_with(make, ask), Mode().loop, **KEPT), unwatched(model_with(make, ask), Mode().loop)
    got.assert_same_bits(plain)
    if name == "engine":
        served = watched(model_with(make, ask), Mode().loop, attention="kernels")
        served.assert_near(plain, rtol=1e-5, atol=1e-6)
        assert "2 x kernels (" in served.report
    assert got.rows == [2 * 12 * STEPS] * 8
    assert_alike(got, watched(model_of(of_pytorch(rule)), Mode().loop, **KEPT))


BLOCKS: Any = torch.zeros(3, 1, dtype=torch.int32)
UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    "block_table to {}.flash_attn_2": lambda: model_of(
        flat(TWO.flash_attn_varlen_func, *PACKED, causal=True, block_table=BLOCKS)
    ),
    "attention_chunk to {}.flash_attn_3": lambda: model_of(
        lambda q, k, v: THREE.flash_attn_func(q, k, v, causal=True, attention_chunk=4)
    ),
    "alibi_slopes to {}.flash_attn_2": lambda: model_of(
        lambda q, k, v: TWO.flash_attn_func(q, k, v, causal=True, alibi_slopes=SLOPES)
    ),
    "learnable_sink, mask_mod to {}.flash_attn_4": lambda: model_of(
        lambda q, k, v: FOUR.flash_attn_func(q, k, v, learnable_sink=SLOPES, mask_mod=masked)
    ),
    "core_attention_bias to {}.transformer_engine": lambda: model_with(
        lambda: Engine(4, 4, 2), asked(tokens_first, core_attention_bias=torch.zeros(12, 12))
    ),
    "attn_mask_type=padding_causal to {}.transformer_engine": lambda: model_with(
        lambda: Engine(4, 4, 2), asked(tokens_first, attn_mask_type="padding_causal")
    ),
    "softmax_type to {}.transformer_engine": lambda: model_with(
        lambda: Engine(4, 4, 2, softmax_type="off-by-one"), tokens_first
    ),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_an_argument_that_is_not_known_leaves_its_call_unmeasured_and_is_named(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    got = watched(UNKNOWN[what](), Mode().loop, **KEPT)
    got.assert_same_bits(unwatched(UNKNOWN[what](), Mode().loop))
    assert got.rows == [0] * 8
    assert f"it passes {what.format('tests.monitor.stand_ins')}, which is not probed" in caplog.text


class Outer(transformer_engine.DotProductAttention):
    """As Megatron's TEDotProductAttention."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = super().forward(*args, **kwargs)
        return out


def test_a_subclass_is_found_and_its_own_parts_are_no_layers_of_their_own() -> None:
    core = Outer(4, 4, 2)
    core.unfused = WithCore(Engine(4, 4, 2), tokens_first)
    found = find_attention(nn.Sequential(core), {})
    assert [(each.name, each.heads, each.kv_heads, each.problem) for each in found] == [("0", 4, 2, None)]


def test_of_a_module_that_calls_a_library_inside_the_inner_call_is_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def through_flash(q: Tensor, k: Tensor, v: Tensor, scale: float, rule: dict[str, Any]) -> Any:
        return flash_attn_2.flash_attn_func(q, k, v, softmax_scale=scale, causal=rule["causal"])

    monkeypatch.setattr(transformer_engine.Fused, "apply", staticmethod(through_flash))
    make, ask, rule = MODULES["engine"]
    got = watched(model_with(make, ask), Mode().loop, **KEPT)
    assert got.rows == [2 * 12 * STEPS] * 8
    assert_alike(got, watched(model_of(of_pytorch(rule)), Mode().loop, **KEPT))


def own_varlen(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, *options: Any) -> tuple[Tensor, None, None]:
    """PyTorch's own needs a GPU; this is the same in its operators, for causal calls."""
    assert [-1, 0] in options
    sequence = torch.searchsorted(cu_q[1:].contiguous(), torch.arange(len(query)), right=True)
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    seen = (sequence[:, None] == sequence).tril()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value), None, None


@pytest.mark.parametrize("attention", ["keep", "kernels"])
def test_packed_sequences_of_pytorchs_own_function_are_watched(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (query, wide(key, query), wide(value, query)))
        out: Any = varlen_attn(q, k, v, *PACKED, window_size=(-1, 0))
        return out.view(query.shape)  # type: ignore[no-any-return]

    before = vars(varlen)["varlen_attn"]
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", own_varlen)
    got = watched(model_of(call), Mode().loop, **KEPT | {"attention": attention})
    expected = watched(model_of(of_pytorch({"causal": True, "ends": BOUNDS})), Mode().loop, **KEPT)
    got.assert_near(expected, rtol=1e-5, atol=1e-6)
    assert_alike(got, expected)
    assert got.rows == [2 * 12 * STEPS] * 8
    assert vars(varlen)["varlen_attn"] is before is varlen_attn
