"""Which backwards the kernel for Hopper takes, what is launched beside it, and what it compiles into."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels import machine_code
from tests.kernels.stand_in_launch import StandInLaunch
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
CORRECTED, TRITON = ["rows", "dQ of corrected heads"], ["rows", "dQ", "dK, dV"]


pytestmark = pytest.mark.usefixtures("on_hopper")


class Problem:
    """A backward's call and tensors, of [B, H, S, D]; nothing is in them."""

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
    def taken(self) -> bool:
        return hopper.takes_backward(self.call, self.given, self.grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("length", [1, 127, 128, 1000])
def test_head_dim_128_is_taken_in_both_types_whole_and_causal(length: int, causal: str, dtype: torch.dtype) -> None:
    assert Problem((length, length), dtype=dtype, causal=causal).taken


SHAPE = (2, 4, 256, DIM)
UNREADABLE = {
    "shifted": torch.empty(2 * 4 * 256 * DIM + 1, dtype=torch.bfloat16)[1:].view(SHAPE),
    "repeated": torch.empty(2, 1, 256, DIM, dtype=torch.bfloat16).expand(SHAPE),
}
"""Gradients that the copy engine cannot read."""


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"heads": (8, 2)}, True),
        ({"lengths": (2049, 2049), "heads": (8, 2), "causal": "top_left"}, True),
        ({"lengths": (2048, 2048), "heads": (8, 2), "causal": "top_left"}, False),  # where Triton is faster
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
def test_what_the_kernel_computes_is_taken_and_all_else_is_left_to_triton(given: dict[str, Any], taken: bool) -> None:
    assert Problem(**given).taken == taken


@pytest.mark.parametrize("capability", [0, 80, 89, 100])
def test_other_gpus_are_left_to_triton(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_capability", lambda device: capability)
    assert not Problem().taken


def test_who_asks_for_triton_s_alone_gets_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_KERNELS", "triton")
    assert not Problem().taken


@pytest.mark.parametrize(
    ("length", "heads", "causal", "members"),
    [
        (8192, (32, 8), "top_left", 4),  # 1024 programs of four heads for 132 processors
        (4096, (32, 8), "top_left", 2),
        (8192, (32, 32), "top_left", 1),
        (8192, (64, 8), "top_left", 4),  # more run apart
        (16384, (24, 8), "top_left", 3),
        (8192, (10, 2), "top_left", 1),  # five have no other divisor
        (8192, (8, 1), "top_left", 1),
        (1024, (32, 8), "none", 2),
        (2048, (16, 2), "none", 2),
        (8192, (16, 2), "none", 8),
        (1, (2, 1), "none", 1),
    ],
)
def test_a_program_takes_as_many_heads_of_a_key_head_as_leave_a_gpu_s_processors_enough_programs(
    length: int, heads: tuple[int, int], causal: str, members: int
) -> None:
    assert hopper.fastest_members(Problem((length, length), heads, causal=causal).call, 132) == members


def test_a_check_goes_through_every_version_also_where_triton_is_faster_and_leaves_the_choice_as_it_was() -> None:
    def fails() -> None:
        for _ in hopper.each_version(DIM, 4):
            raise KeyError

    problem = Problem(heads=(8, 2), causal="top_left")
    assert not problem.taken
    seen = [(problem.taken, hopper.members_of(problem.call, torch.device("cpu"))) for _ in hopper.each_version(DIM, 4)]
    assert seen == [(True, 1), (True, 4)]
    assert [problem.taken for _ in hopper.each_version(64, 4)] == [False]
    with pytest.raises(KeyError):
        fails()
    assert not problem.taken
    assert "hopper members" not in problem.call.plans


def test_without_a_gpu_or_shared_heads_there_is_one_version() -> None:
    assert list(each_version(DIM, 1)) == [None]
    if not torch.cuda.is_available():
        assert list(each_version(DIM, 4)) == [None]


class Launches(StandInLaunch):
    """Stands in for every pass, and keeps which were launched, and whether with addresses for tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> None:
        super().__init__(failure)
        self.addresses: list[bool] = []
        monkeypatch.setattr(Call, "takes_addresses", lambda _: True)
        monkeypatch.setattr(hopper.BACKWARD, "load", self.kernel)
        monkeypatch.setattr(backward, "launch_rows", self._rows)
        monkeypatch.setattr(backward, "launch_grad_query", self._grad_query)
        monkeypatch.setattr(backward, "launch_grad_key", lambda *_: self.made.append("dK, dV"))
        monkeypatch.setattr(backward, "launch_count", lambda *_: self.made.append("count"))

    def _rows(self, call: Call, given: Tensors, addresses: bool) -> None:
        self.made.append("rows")
        self.addresses.append(addresses)

    def _grad_query(self, *_: object, corrected_only: bool = False) -> None:
        self.made.append("dQ of corrected heads" if corrected_only else "dQ")

    def of(self, problem: Problem) -> list[str]:
        chosen = configs(90, DIM, problem.call.mean_keys)
        backward.launch_backward(problem.call, chosen, problem.given, problem.grads)
        made, self.made = self.made, []
        return made


def test_one_kernel_stands_for_two_passes_and_the_choice_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    assert launches.of(Problem()) == ["rows", "hopper", "count"]
    assert launches.of(Problem(softcap=30.0)) == [*TRITON, "count"]
    monkeypatch.setattr(hopper, "serves", None)  # which is not asked again
    assert launches.of(Problem()) == ["rows", "hopper", "count"]
    assert launches.of(Problem(softcap=30.0)) == [*TRITON, "count"]


def test_where_heads_have_modes_dq_of_corrected_heads_comes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, modes = Launches(monkeypatch), torch.zeros(4, dtype=torch.int32)
    assert launches.of(Problem(modes=modes)) == [*CORRECTED, "hopper", "count"]
    assert launches.of(Problem(modes=modes, softcap=30.0)) == [*TRITON, "count"]


def test_what_the_host_knows_of_modes_chooses_the_passes_and_each_choice_makes_launches_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches, modes = Launches(monkeypatch), torch.zeros(4, dtype=torch.int32)
    some, every, none = (0, 8, 0, 0), (8, 9, 8, 8), (0, 1, 4, 0)
    passes = {some: [*CORRECTED, "hopper"], every: TRITON, none: ["rows", "hopper"]}
    for flags in (some, every, none) * 2:
        note_modes(modes, flags)
        assert launches.of(Problem(modes=modes)) == [*passes[flags], "count"]
    assert launches.addresses == [False] * 3 + [True] * 3


def test_who_wants_equal_bits_gets_triton_s_passes_from_one_call_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    made = []
    for deterministic in (False, True, False, True):
        torch.use_deterministic_algorithms(deterministic)
        made.append(launches.of(Problem()))
    assert made == [["rows", "hopper", "count"], [*TRITON, "count"]] * 2
    # No launch of either way was made when the first call of each came: these need tensors.
    assert launches.addresses == [False, False, True, True]


@pytest.mark.parametrize("members", [(1, 4), (4, 1)])
def test_each_version_of_a_call_has_launches_of_its_own_to_make_before_addresses_are_enough(
    members: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(monkeypatch)
    for asked in (*members, *members):
        monkeypatch.setattr(hopper, "_asked", [asked])
        assert launches.of(Problem(heads=(8, 2))) == ["rows", "hopper", "count"]
    assert launches.addresses == [False, False, True, True]


@pytest.mark.parametrize("failure", [ImportError("no module named gluon"), RuntimeError("PassManager::run failed")])
def test_where_the_kernel_cannot_be_had_triton_begins_again_and_one_warning_says_so(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, modes = Launches(monkeypatch, failure), torch.zeros(4, dtype=torch.int32)
    with pytest.warns(UserWarning, match=rf"backward for Hopper could not be launched \({type(failure).__name__}"):
        assert launches.of(Problem(modes=modes)) == [*CORRECTED, *TRITON, "count"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launches.of(Problem(modes=modes)) == launches.of(Problem((512, 512))) == [*TRITON, "count"]
        launches.failure = None
        of_another_kind = launches.of(Problem(causal="top_left"))
    assert of_another_kind == ([*TRITON, "count"] if isinstance(failure, ImportError) else ["rows", "hopper", "count"])


def test_where_memory_is_short_that_is_said_and_the_kernel_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch, torch.OutOfMemoryError("no memory for the sums"))
    with pytest.raises(torch.OutOfMemoryError, match="no memory for the sums"):
        launches.of(Problem())
    launches.made, launches.failure = [], None
    assert launches.of(Problem()) == ["rows", "hopper", "count"]


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
def test_it_compiles_into_five_products_a_tile_that_keep_to_registers_and_shared_memory(
    causal: bool, tail: bool, dtype: str, shared: bool, tmp_path: Path
) -> None:
    compiled = pytest.importorskip("tests.kernels.hopper_compiled", reason="needs a Triton that has Gluon")
    kernel = compiled.compiled_backward(causal=causal, tail=tail, dtype=dtype, shared=shared)
    of_scores = 1 + DIM // DEPTH  # the first adds -lse, or -delta
    grads = 2 * QUERIES // DEPTH
    of_query = 2 * KEYS // DEPTH
    # Of two groups each: the first tile's P and dP, the loop, and the last tile's gradients.
    products = 2 * 2 * (2 * of_scores + grads + of_query)
    assert len(re.findall(r"wgmma\.mma_async", kernel.asm["ptx"])) == products
    assert "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add" in kernel.asm["ptx"]
    assert "st.local" not in kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED_MEMORY
    lines = machine_code.listing(kernel, tmp_path)
    assert sum("HGMMA" in line for line in lines) == products
    assert machine_code.products_of_stale_registers(lines) == []
    # ptxas puts two registers of each group away beside dK's operands, as it did where this was measured, and no more;
    # and outside the loop one, or up to three of each group where shared gradients are added.
    assert sum(bool(re.search(r"\bSTL\b", line)) for line in lines) <= (10 if shared else 5)
