"""Which forwards the kernel for Hopper takes, that Triton's serves without it, and what it compiles into."""

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

from foreshock.kernels.flash_attention import AttentionSpec, launch
from foreshock.kernels.flash_attention.known_modes import note_modes
from foreshock.kernels.flash_attention.launch import Call, call_of
from foreshock.kernels.flash_attention.spec import Arguments
from foreshock.kernels.flash_attention.triton_kernels import forward, hopper

Shape = tuple[int, int, int]


pytestmark = pytest.mark.usefixtures("on_hopper")


def tensors(
    queries: Shape = (2, 4, 256), keys: Shape = (2, 4, 256), dim: int = 128, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.empty(*shape, dim, dtype=dtype) for shape in (queries, keys, keys))
    return query, key, value


def call_for(inputs: tuple[Tensor, Tensor, Tensor], packed: Tensor | None = None, **options: object) -> Call:
    query, key, value = inputs
    spec = AttentionSpec(**({"scale": 0.1} | options))  # type: ignore[arg-type]
    return call_of(query, key, value, Arguments(None, packed, packed, query.shape[2], key.shape[2], None, spec))


def served(inputs: tuple[Tensor, Tensor, Tensor], **options: object) -> bool:
    return hopper.serves(call_for(inputs, **options), *inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("length", [1, 127, 128, 1000])
def test_head_dim_128_is_served_in_both_types_at_any_length(length: int, causal: str, dtype: torch.dtype) -> None:
    assert served(tensors((2, 4, length), (2, 4, length), dtype=dtype), causal=causal)


@pytest.mark.parametrize(
    ("version", "known"),
    [("3.5.1", False), ("3.6.0", True), ("3.7.1", True), ("3.8.0", True), ("3.9.0", False), ("3.60.0", False)],
)
def test_only_versions_of_triton_whose_machine_code_was_searched_serve(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.__version__", version)
    assert served(tensors()) == known


def test_grouped_heads_other_lengths_and_views_with_aligned_strides_are_served() -> None:
    assert served(tensors((2, 8, 256), (2, 2, 256)), causal="top_left")
    assert served(tensors((2, 4, 100), (2, 4, 300)))
    for width in (128, 136):
        query, key, value = torch.empty(3, 2, 256, 4, width, dtype=torch.bfloat16)[..., :128].transpose(2, 3).unbind()
        assert served((query, key, value), causal="top_left")


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ({}, {"window_left": 64}),
        ({}, {"window_right": 64}),
        ({}, {"causal": "top_left", "window_left": 64}),
        ({}, {"softcap": 30.0}),
        ({}, {"dropout_p": 0.1}),
        ({}, {"scale": 0.0}),
        ({}, {"scale": -0.1}),
        *(
            ({"queries": (2, 4, queries), "keys": (2, 4, keys)}, {"causal": causal})
            for queries, keys in ((100, 300), (300, 100))
            for causal in ("top_left", "bottom_right")
        ),
        *(({"dim": dim}, {}) for dim in (64, 96, 120, 136, 256)),
        (
            {"queries": (1, 4, 256), "keys": (1, 4, 256)},
            {"packed": torch.tensor([0, 100, 256], dtype=torch.int32)},
        ),
    ],
)
def test_what_the_kernel_does_not_compute_is_left_to_triton(shapes: dict[str, Any], options: dict[str, object]) -> None:
    assert not served(tensors(**shapes), **options)


def test_so_are_tensors_that_the_copy_engine_cannot_read() -> None:
    query, key, value = tensors()
    shifted = torch.empty(query.numel() + 1, dtype=query.dtype)[1:].view_as(query)
    narrow = torch.empty(2, 4, 256, 132, dtype=query.dtype)[..., :128]
    repeated = torch.empty(2, 1, 256, 128, dtype=query.dtype).expand_as(key)
    assert not served((shifted, key, value))
    assert not served((query, narrow, value))
    assert not served((query, key, repeated))


@pytest.mark.parametrize("capability", [0, 80, 86, 89, 100, 120])
def test_so_are_other_gpus(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_capability", lambda device: capability)
    assert not served(tensors())


def outputs_of(inputs: tuple[Tensor, Tensor, Tensor]) -> Any:
    rows = torch.empty(inputs[0].shape[:-1])
    return torch.empty_like(inputs[0]), None, rows, rows, rows


class Launches(StandInLaunch):
    """Stands in for the kernel and for Triton's forward, and keeps who was launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> None:
        super().__init__(failure)
        monkeypatch.setattr(hopper.FORWARD, "load", self.kernel)
        monkeypatch.setattr(forward, "launch_forward", self._triton)

    def _triton(self, *_: object, shifted: bool = False) -> None:
        self.made.append("triton for heads that shift" if shifted else "triton")

    def of(self, inputs: tuple[Tensor, Tensor, Tensor], modes: Tensor | None = None, **options: object) -> list[str]:
        call = call_for(inputs, **options)  # type: ignore[arg-type]
        given = Arguments(modes, None, None, call.total_q, call.total_k, None, call.spec)
        forward.launch_fastest(call, inputs, outputs_of(inputs), given)
        made, self.made = self.made, []
        return made


def test_one_kernel_is_launched_and_the_choice_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, inputs = Launches(monkeypatch), tensors()
    assert launches.of(inputs) == ["hopper"]
    assert launches.of(inputs, softcap=30.0) == ["triton"]
    monkeypatch.setattr(hopper, "serves", None)  # which is not asked again
    assert launches.of(inputs) == ["hopper"]
    assert launches.of(inputs, softcap=30.0) == ["triton"]


def test_where_heads_have_modes_triton_s_takes_those_that_shift_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, modes = Launches(monkeypatch), torch.zeros(4, dtype=torch.int32)
    assert launches.of(tensors(), modes) == ["hopper", "triton for heads that shift"]
    assert launches.of(tensors(), modes, softcap=30.0) == ["triton", "triton for heads that shift"]


def test_triton_s_is_left_out_while_no_head_is_known_to_shift_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, modes = Launches(monkeypatch), torch.zeros(4, dtype=torch.int32)
    for flags, shifted in ((0, 0, 0, 0), False), ((0, 8, 1, 0), False), ((0, 4, 0, 0), True):
        note_modes(modes, flags)
        others = ["triton for heads that shift"] * shifted
        assert launches.of(tensors(), modes) == ["hopper", *others]
        assert launches.of(tensors(), modes, softcap=30.0) == ["triton", *others]


@pytest.mark.parametrize("failure", [ImportError("no module named gluon"), RuntimeError("PassManager::run failed")])
def test_where_the_kernel_cannot_be_had_triton_serves_and_one_warning_says_so(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(monkeypatch, failure)
    modes = torch.zeros(4, dtype=torch.int32)
    with pytest.warns(UserWarning, match=rf"for Hopper could not be launched \({type(failure).__name__}"):
        assert launches.of(tensors(), modes) == ["triton", "triton for heads that shift"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launches.of(tensors()) == launches.of(tensors((1, 4, 256), (1, 4, 256))) == ["triton"]
        launches.failure = None
        of_another_kind = launches.of(tensors((1, 4, 64), (1, 4, 64)))
    assert of_another_kind == (["triton"] if isinstance(failure, ImportError) else ["hopper"])


def test_who_asks_for_triton_s_alone_gets_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_KERNELS", "triton")
    assert Launches(monkeypatch).of(tensors()) == ["triton"]
    modes = torch.zeros(4, dtype=torch.int32)
    made = Launches(monkeypatch).of(tensors((1, 4, 64), (1, 4, 64)), modes)
    assert made == ["triton", "triton for heads that shift"]


def compiled(**version: Any) -> Any:
    made = pytest.importorskip("tests.kernels.hopper_compiled", reason="needs a Triton that has Gluon")
    return made.compiled(**version)


def softmaxes(kernel: Any) -> list[str]:
    """From the wait that leaves one product running to the wait for it, in the loop of one group of warps or of both,
    since the text ends early."""
    beside = re.findall(r"gsb0, 0x1(.*?)gsb0, 0x0", kernel.asm["sass"], re.DOTALL)
    return [part for part in beside if "MUFU.EX2" in part]


@pytest.mark.parametrize(
    ("causal", "residual", "second", "modes"),
    [
        (False, True, True, True),
        (True, False, False, False),
        pytest.param(False, True, True, False, marks=pytest.mark.full),
        pytest.param(True, True, True, True, marks=pytest.mark.full),
        pytest.param(True, True, True, False, marks=pytest.mark.full),
        pytest.param(True, False, False, True, marks=pytest.mark.full),
    ],
)
def test_it_compiles_into_a_loop_whose_softmax_runs_beside_a_product(
    causal: bool, residual: bool, second: bool, modes: bool, tmp_path: Path
) -> None:
    kernel = compiled(causal=causal, residual=residual, modes=modes, second=second)
    steps = 128 // 16  # products of a tile's scores, and as many of its values
    # Of two groups of warps each: the first scores, the loop, and a block's last values beside the next one's scores.
    products = 2 * (steps + 2 * 2 * steps)
    assert len(re.findall(r"wgmma\.mma_async", kernel.asm["ptx"])) == products
    assert "cp.async.bulk.tensor.4d" in kernel.asm["ptx"]
    # An exponential for each score of a thread, and one for each of its two rows, and no register that was put away in
    # memory.
    loops = softmaxes(kernel)
    assert {part.count("MUFU.EX2") for part in loops} == {64 + 2}
    assert not re.search(r"\b(STL|LDL)\b", "".join(loops))
    lines = machine_code.listing(kernel, tmp_path)
    assert sum("HGMMA" in line for line in lines) == products
    assert machine_code.products_of_stale_registers(lines) == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("causal", "tail", "second", "dtype"),
    [(False, True, True, "bf16"), (True, False, False, "bf16"), (True, False, True, "fp16")],
)
def test_no_product_takes_a_stale_tile_past_the_last_key_nor_where_nothing_is_counted_nor_in_fp16(
    causal: bool, tail: bool, second: bool, dtype: str, tmp_path: Path
) -> None:
    kernel = compiled(causal=causal, residual=True, modes=True, second=second, tail=tail, dtype=dtype)
    lines = machine_code.listing(kernel, tmp_path)
    assert any("HGMMA" in line for line in lines)
    assert machine_code.products_of_stale_registers(lines) == []
