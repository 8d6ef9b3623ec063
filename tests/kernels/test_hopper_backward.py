"""Which backwards use the Hopper kernel, which other passes are launched, and the compiled code of the kernel."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels import machine_code
from tests.kernels.fake_launch import FakeLaunch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

from foreshock.kernels.flash_attention import AttentionSpec, launch, new_state
from foreshock.kernels.flash_attention.known_modes import note_modes
from foreshock.kernels.flash_attention.launch import Call, call_of
from foreshock.kernels.flash_attention.op import each_version
from foreshock.kernels.flash_attention.spec import Arguments, Saved
from foreshock.kernels.flash_attention.triton_kernels import backward, hopper
from foreshock.kernels.flash_attention.triton_kernels.passes import Grads, Tensors
from foreshock.kernels.flash_attention.triton_kernels.tuning import configs

DIM, KEYS, QUERIES, DEPTH = 128, 64, 64, 16
SHARED_MEMORY = 232_448
CORRECTED_PASSES, TRITON_PASSES = ["rows", "dQ of corrected heads"], ["rows", "dQ", "dK, dV"]


pytestmark = pytest.mark.usefixtures("on_hopper")


class Problem:
    """The call and the uninitialised tensors [B, H, S, D] of a backward."""

    def __init__(
        self,
        lengths: tuple[int, int] = (256, 256),
        heads: tuple[int, int] = (4, 4),
        dim: int = DIM,
        dtype: torch.dtype = torch.bfloat16,
        grad_out: Tensor | None = None,
        modes: Tensor | None = None,
        grad_lse: Tensor | None = None,
        **options: object,
    ) -> None:
        query, out, residual = (torch.empty(2, heads[0], lengths[0], dim, dtype=dtype) for _ in range(3))
        key, value = (torch.empty(2, heads[1], lengths[1], dim, dtype=dtype) for _ in range(2))
        vectors = torch.empty(len(Saved._fields) - 5, *query.shape[:-1])
        grad_out = torch.empty_like(query) if grad_out is None else grad_out
        spec = AttentionSpec(**({"scale": 0.1} | options))  # type: ignore[arg-type]
        saved, state = Saved(query, key, value, out, residual, *vectors), new_state(heads[0], "cpu")
        self.given = Tensors(grad_out, *saved, state, modes, None, None, None, grad_lse)
        arguments = Arguments(modes, None, None, *lengths, None, spec)
        self.call: Call = call_of(query, key, value, arguments, grad_out, *saved[3:], state, grad_lse)
        self.grads: Grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    @property
    def uses_hopper(self) -> bool:
        return hopper.takes_backward(self.call, self.given, self.grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("length", [1, 127, 128, 1000])
def test_head_dim_128_uses_the_hopper_kernel_at_any_length(length: int, causal: str, dtype: torch.dtype) -> None:
    assert Problem((length, length), dtype=dtype, causal=causal).uses_hopper


SHAPE = (2, 4, 256, DIM)
UNREADABLE = {
    "shifted": torch.empty(2 * 4 * 256 * DIM + 1, dtype=torch.bfloat16)[1:].view(SHAPE),
    "repeated": torch.empty(2, 1, 256, DIM, dtype=torch.bfloat16).expand(SHAPE),
}
"""Gradients that the copy engine cannot read."""


@pytest.mark.parametrize(
    ("given", "uses_hopper"),
    [
        ({"heads": (8, 2)}, True),
        ({"lengths": (2049, 2049), "heads": (8, 2), "causal": "top_left"}, True),
        ({"lengths": (2048, 2048), "heads": (8, 2), "causal": "top_left"}, False),  # Triton is faster
        ({"lengths": (2048, 2048), "causal": "top_left"}, True),
        ({"lengths": (100, 300)}, True),
        ({"lengths": (300, 100)}, True),
        ({"modes": torch.zeros(4, dtype=torch.int32)}, True),
        ({"grad_lse": torch.zeros(2, 4, 256)}, True),
        ({"window_left": 64}, False),
        ({"window_right": 64}, False),
        ({"causal": "top_left", "window_left": 64}, False),
        ({"softcap": 30.0}, False),
        ({"dropout_p": 0.1}, False),
        ({"scale": 0.0}, False),
        ({"scale": -0.1}, False),
        *(({"lengths": lengths, "causal": "top_left"}, False) for lengths in ((100, 300), (300, 100))),
        *(({"dim": dim}, False) for dim in (64, 120, 136, 256)),
        *(({"grad_out": grad_out}, False) for grad_out in UNREADABLE.values()),
    ],
)
def test_only_supported_calls_use_the_hopper_kernel(given: dict[str, Any], uses_hopper: bool) -> None:
    assert Problem(**given).uses_hopper == uses_hopper


@pytest.mark.parametrize("capability", [0, 80, 89, 100])
def test_other_gpus_use_triton(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_capability", lambda device: capability)
    assert not Problem().uses_hopper


def test_environment_variable_forces_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_KERNELS", "triton")
    assert not Problem().uses_hopper


@pytest.mark.parametrize(
    ("length", "heads", "causal", "members"),
    [
        (8192, (32, 8), "top_left", 4),  # 1024 programs of four heads for 132 multiprocessors
        (4096, (32, 8), "top_left", 2),
        (8192, (32, 32), "top_left", 1),
        (8192, (64, 8), "top_left", 4),  # at most four under a causal mask
        (16384, (24, 8), "top_left", 3),
        (8192, (10, 2), "top_left", 1),  # five is not divisible by 2, 3 or 4
        (8192, (8, 1), "top_left", 1),
        (1024, (32, 8), "none", 2),
        (2048, (16, 2), "none", 2),
        (8192, (16, 2), "none", 8),
        (1, (2, 1), "none", 1),
    ],
)
def test_query_heads_per_program_leave_enough_programs_for_the_gpu(
    length: int, heads: tuple[int, int], causal: str, members: int
) -> None:
    assert hopper.fastest_members(Problem((length, length), heads, causal=causal).call, 132) == members


def test_each_version_includes_slower_versions_and_restores_the_choice() -> None:
    def fails() -> None:
        for _ in hopper.each_version(DIM, 4):
            raise KeyError

    problem = Problem(heads=(8, 2), causal="top_left")
    assert not problem.uses_hopper
    seen = [
        (problem.uses_hopper, hopper.members_of(problem.call, torch.device("cpu"))) for _ in hopper.each_version(DIM, 4)
    ]
    assert seen == [(True, 1), (True, 4)]
    assert [problem.uses_hopper for _ in hopper.each_version(64, 4)] == [False]
    with pytest.raises(KeyError):
        fails()
    assert not problem.uses_hopper
    assert "hopper members" not in problem.call.plans


def test_one_version_exists_without_a_gpu_or_shared_heads() -> None:
    assert list(each_version(DIM, 1)) == [None]
    if not torch.cuda.is_available():
        assert list(each_version(DIM, 4)) == [None]


class Launches(FakeLaunch):
    """Replaces every pass, and records which were launched and whether with addresses instead of tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> None:
        super().__init__(failure)
        self.addresses: list[bool] = []
        monkeypatch.setattr(Call, "takes_addresses", lambda _: True)
        monkeypatch.setattr(hopper.BACKWARD, "load", self.kernel)
        monkeypatch.setattr(backward, "launch_rows", self._rows)
        monkeypatch.setattr(backward, "launch_grad_query", self._grad_query)
        monkeypatch.setattr(backward, "launch_grad_key", lambda *_: self.launched.append("dK, dV"))
        monkeypatch.setattr(backward, "launch_count", lambda *_: self.launched.append("count"))

    def _rows(self, call: Call, given: Tensors, addresses: bool) -> None:
        self.launched.append("rows")
        self.addresses.append(addresses)

    def _grad_query(self, *_: object, corrected_only: bool = False) -> None:
        self.launched.append("dQ of corrected heads" if corrected_only else "dQ")

    def run(self, problem: Problem) -> list[str]:
        chosen = configs(90, DIM, problem.call.mean_keys)
        backward.launch_backward(problem.call, chosen, problem.given, problem.grads)
        launched, self.launched = self.launched, []
        return launched


def test_hopper_kernel_replaces_two_passes_and_the_choice_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    assert launches.run(Problem()) == ["rows", "hopper", "count"]
    assert launches.run(Problem(softcap=30.0)) == [*TRITON_PASSES, "count"]
    monkeypatch.setattr(hopper, "serves", None)  # must not be called again
    assert launches.run(Problem()) == ["rows", "hopper", "count"]
    assert launches.run(Problem(softcap=30.0)) == [*TRITON_PASSES, "count"]


def test_dq_of_corrected_heads_is_launched_before_the_hopper_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, modes = Launches(monkeypatch), torch.zeros(4, dtype=torch.int32)
    assert launches.run(Problem(modes=modes)) == [*CORRECTED_PASSES, "hopper", "count"]
    assert launches.run(Problem(modes=modes, softcap=30.0)) == [*TRITON_PASSES, "count"]


def test_known_modes_choose_the_passes_and_each_choice_has_separate_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches, modes = Launches(monkeypatch), torch.zeros(4, dtype=torch.int32)
    some_corrected, all_corrected, none_corrected = (0, 8, 0, 0), (8, 9, 8, 8), (0, 1, 4, 0)
    passes = {
        some_corrected: [*CORRECTED_PASSES, "hopper"],
        all_corrected: TRITON_PASSES,
        none_corrected: ["rows", "hopper"],
    }
    for flags in (some_corrected, all_corrected, none_corrected) * 2:
        note_modes(modes, flags)
        assert launches.run(Problem(modes=modes)) == [*passes[flags], "count"]
    assert launches.addresses == [False] * 3 + [True] * 3


def test_deterministic_mode_uses_triton_from_the_next_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    launched = []
    for deterministic in (False, True, False, True):
        torch.use_deterministic_algorithms(deterministic)
        launched.append(launches.run(Problem()))
    assert launched == [["rows", "hopper", "count"], [*TRITON_PASSES, "count"]] * 2
    # The first call of each kind has no cached launches, so it needs tensors.
    assert launches.addresses == [False, False, True, True]


@pytest.mark.parametrize("members", [(1, 4), (4, 1)])
def test_each_version_of_a_call_first_launches_with_tensors(
    members: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(monkeypatch)
    for chosen_members in (*members, *members):
        monkeypatch.setattr(hopper, "_asked", [chosen_members])
        assert launches.run(Problem(heads=(8, 2))) == ["rows", "hopper", "count"]
    assert launches.addresses == [False, False, True, True]


@pytest.mark.parametrize("failure", [ImportError("no module named gluon"), RuntimeError("PassManager::run failed")])
def test_failed_hopper_launch_restarts_with_triton_and_warns_once(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, modes = Launches(monkeypatch, failure), torch.zeros(4, dtype=torch.int32)
    with pytest.warns(UserWarning, match=rf"backward for Hopper could not be launched \({type(failure).__name__}"):
        assert launches.run(Problem(modes=modes)) == [*CORRECTED_PASSES, *TRITON_PASSES, "count"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launches.run(Problem(modes=modes)) == launches.run(Problem((512, 512))) == [*TRITON_PASSES, "count"]
        launches.failure = None
        other_call = launches.run(Problem(causal="top_left"))
    assert other_call == (
        [*TRITON_PASSES, "count"] if isinstance(failure, ImportError) else ["rows", "hopper", "count"]
    )


def test_out_of_memory_is_raised_and_the_hopper_kernel_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch, torch.OutOfMemoryError("no memory for the sums"))
    with pytest.raises(torch.OutOfMemoryError, match="no memory for the sums"):
        launches.run(Problem())
    launches.launched, launches.failure = [], None
    assert launches.run(Problem()) == ["rows", "hopper", "count"]


VERSIONS = [
    (False, True, "bf16", False),
    (True, False, "bf16", True),
    *(
        pytest.param(causal, tail, dtype, shared, marks=pytest.mark.full)
        for causal, tail, dtype in ((False, False, "bf16"), (True, False, "fp16"))
        for shared in (False, True)
    ),
    pytest.param(False, True, "bf16", True, marks=pytest.mark.full),
    pytest.param(True, False, "bf16", False, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("causal", "tail", "dtype", "shared"), VERSIONS)
def test_hopper_backward_compiles_to_five_products_per_tile_with_few_spills(
    causal: bool, tail: bool, dtype: str, shared: bool, tmp_path: Path
) -> None:
    compiled = pytest.importorskip("tests.kernels.hopper_compiled", reason="needs a Triton that has Gluon")
    kernel = compiled.compiled_backward(causal=causal, tail=tail, dtype=dtype, shared=shared)
    score_products = 1 + DIM // DEPTH  # the first adds -lse, or -delta
    grads = 2 * QUERIES // DEPTH
    query_products = 2 * KEYS // DEPTH
    # For each of two warp groups: P and dP of the first tile, the loop, and the gradients of the last tile.
    products = 2 * 2 * (2 * score_products + grads + query_products)
    assert len(re.findall(r"wgmma\.mma_async", kernel.asm["ptx"])) == products
    assert "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add" in kernel.asm["ptx"]
    assert "st.local" not in kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED_MEMORY
    lines = machine_code.listing(kernel, tmp_path)
    assert sum("HGMMA" in line for line in lines) == products
    assert machine_code.products_of_stale_registers(lines) == []
    # ptxas spills two registers per group next to dK's operands, as in the measured build. Outside the loop it spills
    # one, or up to three per group if shared gradients are added.
    assert sum(bool(re.search(r"\bSTL\b", line)) for line in lines) <= (10 if shared else 5)
