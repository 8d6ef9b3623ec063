"""Attention of libraries, by stand-ins with their signatures: kept to the last bit, and measured as PyTorch's own."""

import functools
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.executions import EVERY_STEP, watched
from tests.monitor.library_calls import (
    CALLS,
    ENDS,
    FOUR,
    KEPT,
    PACKED,
    SLOPES,
    THREE,
    TWO,
    XFORMERS,
    Call,
    alone,
    assert_alike,
    efficient,
    flat,
    masked,
    model_of,
    of_pytorch,
    rows_as_one,
)
from tests.monitor.stand_ins import flash_attn_2, flash_attn_3, flash_attn_4, xformers_fmha
from tests.monitor.stand_ins.flash_attn_2 import flash_attn_func as imported_by_name
from tests.monitor.test_executions import STEPS, Mode
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foreshock.monitor import attach
from foreshock.monitor.model.discovery import find_attention

pytestmark = [  # of torch.compile's own doing
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
]

LIBRARIES = (flash_attn_2, flash_attn_3, flash_attn_4, xformers_fmha)


@pytest.fixture(autouse=True)
def _libraries_are_as_they_were() -> Iterator[None]:
    before = [dict(vars(library)) for library in LIBRARIES]
    yield
    assert [dict(vars(library)) for library in LIBRARIES] == before
    torch._dynamo.reset()


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
    for mine, own in zip(got.losses + got.weights, expected.losses + expected.weights, strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-5, atol=1e-6)
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


UNKNOWN: dict[str, Call] = {
    "block_table to {}.flash_attn_2": flat(
        TWO.flash_attn_varlen_func, *PACKED, causal=True, block_table=torch.zeros(3, 1, dtype=torch.int32)
    ),
    "attention_chunk to {}.flash_attn_3": lambda q, k, v: THREE.flash_attn_func(
        q, k, v, causal=True, attention_chunk=4
    ),
    "learnable_sink, mask_mod to {}.flash_attn_4": lambda q, k, v: FOUR.flash_attn_func(
        q, k, v, learnable_sink=SLOPES, mask_mod=masked
    ),
    "a BlockDiagonalPaddedKeysMask to {}.xformers_fmha": rows_as_one(
        efficient(XFORMERS.BlockDiagonalPaddedKeysMask(ENDS, ENDS))
    ),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_an_argument_that_is_not_known_leaves_its_call_unmeasured_and_is_named(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    got = watched(model_of(UNKNOWN[what]), Mode().loop, **KEPT)
    got.assert_same_bits(alone(UNKNOWN[what]))
    assert got.rows == [0] * 8
    assert f"it passes {what.format('tests.monitor.stand_ins')}, which is not probed" in caplog.text


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
}


@pytest.mark.parametrize("way", REACHED)
def test_a_library_is_met_however_its_function_is_reached(way: str) -> None:
    call = REACHED[way]
    assert [found.problem for found in find_attention(model_of(call), {})] == [None] * 2
    got = watched(model_of(call), Mode().loop, **KEPT)
    got.assert_same_bits(alone(by_name))
    assert got.rows == [2 * 12 * STEPS] * 8


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_round_the_call_counts_each_row_once(use_reentrant: bool) -> None:
    def call(*operands: Tensor) -> Tensor:
        return checkpoint(by_name, *operands, use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    got = watched(model_of(call), Mode().loop, **KEPT)
    got.assert_same_bits(alone(call))
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
@pytest.mark.parametrize(
    "name", ["flash_attn", *(pytest.param(name, marks=pytest.mark.full) for name in list(COMPILED)[1:])]
)
def test_a_compiled_model_stays_one_graph_and_is_measured_as_an_eager_one(name: str) -> None:
    call = COMPILED[name]
    mode = Mode(compile={"backend": "aot_eager", "fullgraph": True})
    got = watched(model_of(call), mode.loop, **KEPT)
    got.assert_same_bits(alone(call, mode))
    assert_alike(got, watched(model_of(call), Mode().loop, **KEPT))


@pytest.mark.full
def test_alibi_is_not_measured_in_compiled_code_which_stays_one_graph() -> None:
    call, _ = CALLS["2, ALiBi"]
    mode = Mode(compile={"backend": "aot_eager", "fullgraph": True})
    got = watched(model_of(call), mode.loop, **KEPT)
    got.assert_same_bits(alone(call, mode))
    assert got.rows == [0] * 8
    assert "native attention, not measured" in got.report


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


def test_two_agents_and_their_end_in_any_order_leave_the_library_as_it_was() -> None:
    for first, second in ((0, 1), (1, 0)):
        agents = [attach(model_of(by_name), **EVERY_STEP) for _ in range(2)]
        assert not issubclass(flash_attn_2.FlashAttnFunc, torch.autograd.Function)
        agents[first].close()
        assert not issubclass(flash_attn_2.FlashAttnFunc, torch.autograd.Function)
        agents[second].close()
        assert issubclass(flash_attn_2.FlashAttnFunc, torch.autograd.Function)
