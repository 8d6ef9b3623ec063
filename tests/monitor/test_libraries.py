"""Attention libraries, as fakes with their signatures: training is bit-identical, statistics equal those of SDPA."""

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
from tests.monitor.execution_modes import EVERY_STEP, STEPS, Mode, TrainingResult, train_unwatched, train_watched
from tests.monitor.fake_libraries import (
    flash_attn_2,
    flash_attn_3,
    flash_attn_4,
    transformer_engine,
)
from tests.monitor.fake_libraries.flash_attn_2 import flash_attn_func as imported_by_name
from tests.monitor.library_calls import (
    BOUNDS,
    CALLS,
    FLASH_2,
    FLASH_3,
    FLASH_4,
    NATIVE,
    PACKED,
    SLOPES,
    Call,
    Grouped,
    assert_same_statistics,
    expand_heads,
    gpt_with_call,
    masked,
    pack_sequences,
    reference_call,
    train_call_unwatched,
)
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
def _check_that_libraries_are_restored() -> Iterator[None]:
    before = [dict(vars(each)) for each in (*LIBRARIES, Engine)]
    yield
    assert [dict(vars(each)) for each in (*LIBRARIES, Engine)] == before


@pytest.mark.parametrize("name", CALLS)
def test_library_call_is_bit_identical_and_measured_like_sdpa(name: str) -> None:
    call, rule = CALLS[name]
    got = train_watched(gpt_with_call(call), Mode().loop, **NATIVE)
    got.assert_same_bits(train_call_unwatched(call))
    assert got.rows == [2 * 12 * STEPS] * 8
    assert_same_statistics(got, train_watched(gpt_with_call(reference_call(rule)), Mode().loop, **NATIVE))


def capped(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return FLASH_2.flash_attn_func(query, key, value, causal=True, softcap=0.5)


@pytest.mark.parametrize("call", [CALLS["2"][0], CALLS["2, packed kv"][0], capped], ids=["2", "2, packed kv", "capped"])
def test_kernels_replace_a_library_call_with_the_same_statistics(call: Call) -> None:
    got = train_watched(gpt_with_call(call), Mode().loop, attention="kernels")
    expected = train_call_unwatched(call)
    got.assert_near(expected, rtol=1e-5, atol=1e-6)
    assert "2 x kernels" in got.report
    native = train_watched(gpt_with_call(call), Mode().loop, **NATIVE)
    native.assert_same_bits(expected)
    assert_same_statistics(native, got)


def test_call_that_returns_more_than_its_output_stays_native(
    caplog: pytest.LogCaptureFixture,
) -> None:
    call, _ = CALLS["2, log-sum-exp too"]
    model = gpt_with_call(call)
    with caplog.at_level(logging.INFO, "foreshock"):
        got = train_watched(model, Mode().loop, attention="kernels", probe_rows=10**6)
    got.assert_same_bits(train_call_unwatched(call))
    assert got.rows == [2 * 12 * STEPS] * 8
    assert "returns more than the output, which our kernels do not" in caplog.text


def by_name(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return imported_by_name(query, key, value, causal=True)  # type: ignore[no-any-return]


def imported_in_the_call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from tests.monitor.fake_libraries.flash_attn_2 import flash_attn_func

    return flash_attn_func(query, key, value, causal=True)  # type: ignore[no-any-return]


TABLE = {"flash": functools.partial(imported_by_name, causal=True)}
REFERENCES: dict[str, Call] = {
    "imported by name": by_name,
    "imported in the call": imported_in_the_call,
    "stored in a partial": functools.partial(imported_by_name, causal=True),
    "stored in a dictionary": lambda q, k, v: TABLE["flash"](q, k, v),
    "in a checkpoint": lambda *operands: checkpoint(by_name, *operands, use_reentrant=False),
    "in a reentrant checkpoint": lambda *operands: checkpoint(by_name, *operands, use_reentrant=True),
}


@pytest.mark.parametrize("reference", REFERENCES)
def test_library_function_is_watched_however_it_is_referenced(reference: str) -> None:
    call = REFERENCES[reference]
    assert [found.problem for found in find_attention(gpt_with_call(call), {})] == [None] * 2
    got = train_watched(gpt_with_call(call), Mode().loop, **NATIVE)
    got.assert_same_bits(train_call_unwatched(by_name))
    assert got.rows == [2 * 12 * STEPS] * 8


def keys_that_are_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A call of PyTorch's attention with key as value."""
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True).transpose(1, 2)


COMPILED = {
    "flash_attn": CALLS["2"][0],
    "packed": CALLS["2, packed"][0],
    "packed, with the same cu_seqlens": CALLS["2, packed qkv"][0],
    "keys that are values": keys_that_are_values,
}


@pytest.mark.full
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_library_call_stays_one_graph_and_counts_like_eager(name: str) -> None:
    call = COMPILED[name]
    mode = Mode(compile={"backend": "aot_eager", "fullgraph": True})
    got = train_watched(gpt_with_call(call), mode.loop, **NATIVE)
    got.assert_same_bits(train_call_unwatched(call, mode))
    assert_same_statistics(got, train_watched(gpt_with_call(call), Mode().loop, **NATIVE))


def test_library_imported_after_attach_is_watched_from_the_next_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from flash_attn_interface import flash_attn_func  # type: ignore[import-not-found]

        return flash_attn_func(query, key, value, causal=True)  # type: ignore[no-any-return]

    (tmp_path / "flash_attn_interface.py").write_text(Path(flash_attn_2.__file__).read_text())
    monkeypatch.syspath_prepend(tmp_path)
    try:
        got = train_watched(gpt_with_call(call), Mode().loop, **NATIVE)
        before = dict(vars(sys.modules["flash_attn_interface"]))
    finally:
        del sys.modules["flash_attn_interface"]
    assert got.rows == [2 * 12 * (STEPS - 1)] * 8
    assert issubclass(before["FlashAttnFunc"], torch.autograd.Function)
    got.assert_same_bits(train_call_unwatched(by_name))


def test_library_is_restored_after_two_agents_close_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    importing = types.ModuleType("importing")
    monkeypatch.setitem(sys.modules, "importing", importing)
    for first, second in ((0, 1), (1, 0)):
        agents = [attach(gpt_with_call(by_name), **EVERY_STEP) for _ in range(2)]
        vars(importing)["taken"] = flash_attn_2.FlashAttnFunc
        assert not issubclass(flash_attn_2.FlashAttnFunc, torch.autograd.Function)
        agents[first].close()
        assert not issubclass(flash_attn_2.FlashAttnFunc, torch.autograd.Function)
        agents[second].close()
        assert issubclass(flash_attn_2.FlashAttnFunc, torch.autograd.Function)
        assert vars(importing)["taken"] is flash_attn_2.FlashAttnFunc


ROWS, LENGTH = 2, 12
BIDIRECTIONAL: Any = {**DECODER, "sliding_window": 6, "query_pre_attn_scalar": 8, "use_bidirectional_attention": True}
ENCODER: Any = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MAKERS: Any = TRANSFORMERS | {
    "gemma3, bidirectional window": lambda: tiny("Gemma3Text", "Model", **BIDIRECTIONAL),
    "modernbert, bidirectional window": lambda: tiny(
        "ModernBert", "ForMaskedLM", **ENCODER, local_attention=6, cls_token_id=1, sep_token_id=2
    ),
}


@pytest.fixture(autouse=True)
def _use_fake_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Inputs of a step: whole rows, rows padded on the right, or two sequences packed in one row with position ids."""
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


def trained(name: str, kind: str, implementation: str = "flash_attention_2", **settings: Any) -> TrainingResult:
    def loop(model: Any, stepped: Any) -> list[Tensor]:
        losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            model_inputs = inputs(kind, step)
            logits = model(**model_inputs)[0]
            visible_rows = model_inputs.get("attention_mask", torch.ones_like(model_inputs["input_ids"])).bool()
            losses.append(logits[visible_rows].logsumexp(-1).square().mean())
            torch.autograd.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
            stepped(losses[-1].detach())
        return losses

    model = transformers_model(name, implementation)
    return train_watched(model, loop, **settings) if settings else train_unwatched(model, loop)


CASES = [
    ("Llama", "whole"),
    ("Llama", "padded"),
    ("Llama", "packed"),
    ("Mistral", "packed"),
    ("gemma3, bidirectional window", "whole"),
    ("modernbert, bidirectional window", "whole"),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_transformers_flash_attention_is_bit_identical_measured_and_replaceable(name: str, kind: str) -> None:
    got, expected, with_kernels = (
        trained(name, kind, **NATIVE),
        trained(name, kind),
        trained(name, kind, attention="kernels"),
    )
    got.assert_same_bits(expected)
    visible_rows = ROWS * LENGTH - 5 * (kind == "padded")
    assert got.rows == [visible_rows * STEPS] * 8
    if kind != "padded":  # SDPA counts some padded rows, flash_attn none
        assert_same_statistics(got, trained(name, kind, "sdpa", **NATIVE))
    with_kernels.assert_near(expected, rtol=1e-4, atol=1e-5)
    assert "2 x kernels (" in with_kernels.report
    assert_same_statistics(with_kernels, got)


def test_eager_attention_with_a_flash_only_argument_is_measured() -> None:
    name = "modernbert, bidirectional window"  # passes `deterministic` to every implementation
    got = trained(name, "whole", "eager", **NATIVE)
    assert got.rows == [ROWS * LENGTH * STEPS] * 8
    assert_same_statistics(got, trained(name, "whole", **NATIVE))


Engine = transformer_engine.DotProductAttention


class LibraryModuleAttention(Grouped):
    """Attention by a library's module, which `call_module` calls with its tensor layout."""

    def __init__(self, core: nn.Module, call_module: Callable[..., Tensor]) -> None:
        super().__init__(lambda q, k, v: call_module(self.core_attention, q, k, v))
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


def with_options(call_module: Callable[..., Tensor], *more: Any, **options: Any) -> Callable[..., Tensor]:
    return lambda core, *operands: call_module(core, *operands, *more, **options)


Case = tuple[Callable[[], nn.Module], Callable[..., Tensor], dict[str, Any]]
MODULES: dict[str, Case] = {
    "engine": (lambda: Engine(4, 4, 2), tokens_first, {"causal": True}),
    "engine, tensor parallel": (lambda: Engine(8, 4, 4, tp_size=2), tokens_first, {"causal": True}),
    "engine, batch first": (lambda: Engine(4, 4, 2), with_options(batch_first, attn_mask_type="no_mask"), {}),
    "engine, window": (lambda: Engine(4, 4, 2, window_size=(3, 0)), batch_first, {"causal": True, "window": (3, 0)}),
    "engine, packed": (
        lambda: Engine(4, 4, 2),
        with_options(packed, attn_mask_type="padding_causal"),
        {"causal": True, "ends": BOUNDS},
    ),
}


def gpt_with_module(make: Callable[[], nn.Module], call_module: Callable[..., Tensor]) -> nn.Module:
    torch.manual_seed(5)
    return tiny_gpt(*(LibraryModuleAttention(make(), call_module) for _ in range(2)), seed=3)


@pytest.mark.parametrize("name", MODULES)
def test_library_module_is_bit_identical_and_measured_like_sdpa(name: str) -> None:
    make, call_module, rule = MODULES[name]
    got, plain = (
        train_watched(gpt_with_module(make, call_module), Mode().loop, **NATIVE),
        train_unwatched(gpt_with_module(make, call_module), Mode().loop),
    )
    got.assert_same_bits(plain)
    if name == "engine":
        with_kernels = train_watched(gpt_with_module(make, call_module), Mode().loop, attention="kernels")
        with_kernels.assert_near(plain, rtol=1e-5, atol=1e-6)
        assert "2 x kernels (" in with_kernels.report
    assert got.rows == [2 * 12 * STEPS] * 8
    assert_same_statistics(got, train_watched(gpt_with_call(reference_call(rule)), Mode().loop, **NATIVE))


BLOCKS: Any = torch.zeros(3, 1, dtype=torch.int32)
UNSUPPORTED_ARGUMENTS: dict[str, Callable[[], nn.Module]] = {
    "block_table to {}.flash_attn_2": lambda: gpt_with_call(
        pack_sequences(FLASH_2.flash_attn_varlen_func, *PACKED, causal=True, block_table=BLOCKS)
    ),
    "attention_chunk to {}.flash_attn_3": lambda: gpt_with_call(
        lambda q, k, v: FLASH_3.flash_attn_func(q, k, v, causal=True, attention_chunk=4)
    ),
    "alibi_slopes to {}.flash_attn_2": lambda: gpt_with_call(
        lambda q, k, v: FLASH_2.flash_attn_func(q, k, v, causal=True, alibi_slopes=SLOPES)
    ),
    "learnable_sink, mask_mod to {}.flash_attn_4": lambda: gpt_with_call(
        lambda q, k, v: FLASH_4.flash_attn_func(q, k, v, learnable_sink=SLOPES, mask_mod=masked)
    ),
    "core_attention_bias to {}.transformer_engine": lambda: gpt_with_module(
        lambda: Engine(4, 4, 2), with_options(tokens_first, core_attention_bias=torch.zeros(12, 12))
    ),
    "attn_mask_type=padding_causal to {}.transformer_engine": lambda: gpt_with_module(
        lambda: Engine(4, 4, 2), with_options(tokens_first, attn_mask_type="padding_causal")
    ),
    "softmax_type to {}.transformer_engine": lambda: gpt_with_module(
        lambda: Engine(4, 4, 2, softmax_type="off-by-one"), tokens_first
    ),
}


@pytest.mark.parametrize("argument", UNSUPPORTED_ARGUMENTS)
def test_call_with_an_unknown_argument_is_unmeasured_and_reported(
    argument: str, caplog: pytest.LogCaptureFixture
) -> None:
    got = train_watched(UNSUPPORTED_ARGUMENTS[argument](), Mode().loop, **NATIVE)
    got.assert_same_bits(train_unwatched(UNSUPPORTED_ARGUMENTS[argument](), Mode().loop))
    assert got.rows == [0] * 8
    assert f"it passes {argument.format('tests.monitor.fake_libraries')}, which is not probed" in caplog.text


class MegatronAttention(transformer_engine.DotProductAttention):
    """A subclass, like Megatron's TEDotProductAttention."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = super().forward(*args, **kwargs)
        return out


def test_subclass_of_a_library_module_is_a_single_layer() -> None:
    core = MegatronAttention(4, 4, 2)
    core.unfused = LibraryModuleAttention(Engine(4, 4, 2), tokens_first)
    found = find_attention(nn.Sequential(core), {})
    assert [(each.name, each.heads, each.kv_heads, each.problem) for each in found] == [("0", 4, 2, None)]


def test_library_module_that_calls_another_library_is_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def through_flash(q: Tensor, k: Tensor, v: Tensor, scale: float, rule: dict[str, Any]) -> Any:
        return flash_attn_2.flash_attn_func(q, k, v, softmax_scale=scale, causal=rule["causal"])

    monkeypatch.setattr(transformer_engine.Fused, "apply", staticmethod(through_flash))
    make, call_module, rule = MODULES["engine"]
    got = train_watched(gpt_with_module(make, call_module), Mode().loop, **NATIVE)
    assert got.rows == [2 * 12 * STEPS] * 8
    assert_same_statistics(got, train_watched(gpt_with_call(reference_call(rule)), Mode().loop, **NATIVE))


def varlen_on_cpu(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, *options: Any) -> tuple[Tensor, None, None]:
    """varlen attention for causal calls in plain PyTorch, because PyTorch's own needs a GPU."""
    assert [-1, 0] in options
    sequence = torch.searchsorted(cu_q[1:].contiguous(), torch.arange(len(query)), right=True)
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    seen = (sequence[:, None] == sequence).tril()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value), None, None


@pytest.mark.parametrize("attention", ["keep", "kernels"])
def test_varlen_attn_of_pytorch_is_watched(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (query, expand_heads(key, query), expand_heads(value, query)))
        out: Any = varlen_attn(q, k, v, *PACKED, window_size=(-1, 0))
        return out.view(query.shape)  # type: ignore[no-any-return]

    before = vars(varlen)["varlen_attn"]
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", varlen_on_cpu)
    got = train_watched(gpt_with_call(call), Mode().loop, **NATIVE | {"attention": attention})
    expected = train_watched(gpt_with_call(reference_call({"causal": True, "ends": BOUNDS})), Mode().loop, **NATIVE)
    got.assert_near(expected, rtol=1e-5, atol=1e-6)
    assert_same_statistics(got, expected)
    assert got.rows == [2 * 12 * STEPS] * 8
    assert vars(varlen)["varlen_attn"] is before is varlen_attn
