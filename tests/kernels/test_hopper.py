"""Which forwards use the Hopper kernel, which use Triton's, and the compiled code of the Hopper kernel."""

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


def uses_hopper(inputs: tuple[Tensor, Tensor, Tensor], **options: object) -> bool:
    return hopper.serves(call_for(inputs, **options), *inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("length", [1, 127, 128, 1000])
def test_head_dim_128_uses_the_hopper_kernel_at_any_length(length: int, causal: str, dtype: torch.dtype) -> None:
    assert uses_hopper(tensors((2, 4, length), (2, 4, length), dtype=dtype), causal=causal)


@pytest.mark.parametrize(
    ("version", "checked"),
    [("3.5.1", False), ("3.6.0", True), ("3.7.1", True), ("3.8.0", True), ("3.9.0", False), ("3.60.0", False)],
)
def test_only_checked_triton_versions_use_the_hopper_kernel(
    version: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.__version__", version)
    assert uses_hopper(tensors()) == checked


def test_grouped_heads_unequal_lengths_and_aligned_views_use_the_hopper_kernel() -> None:
    assert uses_hopper(tensors((2, 8, 256), (2, 2, 256)), causal="top_left")
    assert uses_hopper(tensors((2, 4, 100), (2, 4, 300)))
    for width in (128, 136):
        query, key, value = torch.empty(3, 2, 256, 4, width, dtype=torch.bfloat16)[..., :128].transpose(2, 3).unbind()
        assert uses_hopper((query, key, value), causal="top_left")


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
def test_unsupported_options_use_triton(shapes: dict[str, Any], options: dict[str, object]) -> None:
    assert not uses_hopper(tensors(**shapes), **options)


def test_tensors_that_the_copy_engine_cannot_read_use_triton() -> None:
    query, key, value = tensors()
    shifted = torch.empty(query.numel() + 1, dtype=query.dtype)[1:].view_as(query)
    narrow = torch.empty(2, 4, 256, 132, dtype=query.dtype)[..., :128]
    repeated = torch.empty(2, 1, 256, 128, dtype=query.dtype).expand_as(key)
    assert not uses_hopper((shifted, key, value))
    assert not uses_hopper((query, narrow, value))
    assert not uses_hopper((query, key, repeated))


@pytest.mark.parametrize("capability", [0, 80, 86, 89, 100, 120])
def test_other_gpus_use_triton(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_capability", lambda device: capability)
    assert not uses_hopper(tensors())


def outputs_of(inputs: tuple[Tensor, Tensor, Tensor]) -> Any:
    rows = torch.empty(inputs[0].shape[:-1])
    return torch.empty_like(inputs[0]), None, rows, rows, rows


class Launches(FakeLaunch):
    """Replaces the Hopper kernel and Triton's forward, and records which were launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> None:
        super().__init__(failure)
        monkeypatch.setattr(hopper.FORWARD, "load", self.kernel)
        monkeypatch.setattr(forward, "launch_forward", self._triton)

    def _triton(self, *_: object, shifted: bool = False) -> None:
        self.launched.append("triton for shifted heads" if shifted else "triton")

    def run(self, inputs: tuple[Tensor, Tensor, Tensor], modes: Tensor | None = None, **options: object) -> list[str]:
        call = call_for(inputs, **options)  # type: ignore[arg-type]
        given = Arguments(modes, None, None, call.total_q, call.total_k, None, call.spec)
        forward.launch_fastest(call, inputs, outputs_of(inputs), given)
        launched, self.launched = self.launched, []
        return launched


def test_choice_of_the_kernel_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, inputs = Launches(monkeypatch), tensors()
    assert launches.run(inputs) == ["hopper"]
    assert launches.run(inputs, softcap=30.0) == ["triton"]
    monkeypatch.setattr(hopper, "serves", None)  # must not be called again
    assert launches.run(inputs) == ["hopper"]
    assert launches.run(inputs, softcap=30.0) == ["triton"]


def test_triton_also_runs_for_shifted_heads_if_modes_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, modes = Launches(monkeypatch), torch.zeros(4, dtype=torch.int32)
    assert launches.run(tensors(), modes) == ["hopper", "triton for shifted heads"]
    assert launches.run(tensors(), modes, softcap=30.0) == ["triton", "triton for shifted heads"]


def test_triton_is_skipped_if_no_head_is_known_to_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, modes = Launches(monkeypatch), torch.zeros(4, dtype=torch.int32)
    for flags, shifted in ((0, 0, 0, 0), False), ((0, 8, 1, 0), False), ((0, 4, 0, 0), True):
        note_modes(modes, flags)
        shifted_launches = ["triton for shifted heads"] * shifted
        assert launches.run(tensors(), modes) == ["hopper", *shifted_launches]
        assert launches.run(tensors(), modes, softcap=30.0) == ["triton", *shifted_launches]


@pytest.mark.parametrize("failure", [ImportError("no module named gluon"), RuntimeError("PassManager::run failed")])
def test_failed_hopper_launch_falls_back_to_triton_with_one_warning(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(monkeypatch, failure)
    modes = torch.zeros(4, dtype=torch.int32)
    with pytest.warns(UserWarning, match=rf"for Hopper could not be launched \({type(failure).__name__}"):
        assert launches.run(tensors(), modes) == ["triton", "triton for shifted heads"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launches.run(tensors()) == launches.run(tensors((1, 4, 256), (1, 4, 256))) == ["triton"]
        launches.failure = None
        other_shape = launches.run(tensors((1, 4, 64), (1, 4, 64)))
    assert other_shape == (["triton"] if isinstance(failure, ImportError) else ["hopper"])


def test_environment_variable_forces_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_KERNELS", "triton")
    assert Launches(monkeypatch).run(tensors()) == ["triton"]
    modes = torch.zeros(4, dtype=torch.int32)
    launched = Launches(monkeypatch).run(tensors((1, 4, 64), (1, 4, 64)), modes)
    assert launched == ["triton", "triton for shifted heads"]


def compiled(**version: Any) -> Any:
    module = pytest.importorskip("tests.kernels.hopper_compiled", reason="needs a Triton that has Gluon")
    return module.compiled(**version)


def softmaxes(kernel: Any) -> list[str]:
    """Code between the wait that leaves one product running and the wait for that product, in the loop of one warp
    group or of both, because the listing may end early."""
    between_waits = re.findall(r"gsb0, 0x1(.*?)gsb0, 0x0", kernel.asm["sass"], re.DOTALL)
    return [part for part in between_waits if "MUFU.EX2" in part]


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
def test_hopper_forward_compiles_with_the_softmax_overlapping_a_product(
    causal: bool, residual: bool, second: bool, modes: bool, tmp_path: Path
) -> None:
    kernel = compiled(causal=causal, residual=residual, modes=modes, second=second)
    steps = 128 // 16  # products for the scores of a tile, and as many for its values
    # For each of two warp groups: the first scores, the loop, and the last values of a block with the next scores.
    products = 2 * (steps + 2 * 2 * steps)
    assert len(re.findall(r"wgmma\.mma_async", kernel.asm["ptx"])) == products
    assert "cp.async.bulk.tensor.4d" in kernel.asm["ptx"]
    # One exponential for each score of a thread, one for each of its two rows, and no spilled registers.
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
def test_products_never_read_stale_tiles_with_a_tail_without_counts_or_in_fp16(
    causal: bool, tail: bool, second: bool, dtype: str, tmp_path: Path
) -> None:
    kernel = compiled(causal=causal, residual=True, modes=True, second=second, tail=tail, dtype=dtype)
    lines = machine_code.listing(kernel, tmp_path)
    assert any("HGMMA" in line for line in lines)
    assert machine_code.products_of_stale_registers(lines) == []
