"""Shared memory that the kernels need when Triton compiles them for an H100, on any machine."""

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton compiles the kernels")

import torch
from tests.kernels.triton_calls import attend, random_inputs, scaled
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention import launch as launches
from foreshock.kernels.flash_attention.triton_kernels import launcher

H100_BYTES = 232_448
"""CUDA's limit per program at compute capability 9.0."""


class H100:
    """The part of a GPU driver that Triton uses before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def shared_bytes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes that each kernel of a call needs, by name; nothing is launched."""
    needed: dict[str, int] = {}

    def compile_without_launch(launch: Any, tensors: tuple[Any, ...]) -> None:
        given = launcher._given(tensors, launch.tiles, launch.descriptor)
        kernel = launch.kernel.warmup(*given, *launch.numbers, grid=launch.grid, **launch.constants, **launch.options)
        needed[launch.kernel.__name__] = kernel.metadata.shared

    monkeypatch.setattr(launches, "first_launch", compile_without_launch)
    monkeypatch.setattr(launches, "_capability", lambda device: 90)
    monkeypatch.setattr(driver, "_active", H100())
    return needed


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available() or knobs.runtime.interpret, reason="the kernels themselves run")
@pytest.mark.parametrize("dim", [72, 96, 256])
def test_every_kernel_with_modes_fits_the_shared_memory_of_an_h100(dim: int, shared_bytes: dict[str, int]) -> None:
    modes = torch.tensor([int(Mode.ROW_CORRECTED | Mode.EXACT_DELTA), 0, 0, 0], dtype=torch.int32)
    attend(random_inputs(777, 777, dim, 4, 2), scaled(dim, causal="top_left"), modes)
    assert {"forward_kernel", "grad_query_kernel", "grad_key_kernel"} <= set(shared_bytes)
    assert {name: size for name, size in shared_bytes.items() if size > H100_BYTES} == {}
