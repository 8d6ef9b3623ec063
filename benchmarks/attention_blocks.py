"""The attention kernels one by one under several configurations, from which tuning.py was chosen.

`python -P -m foreshock.benchmarks.attention_blocks`, on a CUDA GPU.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch

from foreshock.benchmarks.attention import TOKENS
from foreshock.benchmarks.stopwatch import Stopwatch
from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention import AttentionSpec, counting, forward, grad_key, grad_query, new_state
from foreshock.kernels.flash_attention import rows as rows_pass
from foreshock.kernels.flash_attention.launch import call_of
from foreshock.kernels.flash_attention.means import launch_means
from foreshock.kernels.flash_attention.passes import Tensors
from foreshock.kernels.flash_attention.spec import Arguments
from foreshock.kernels.flash_attention.tuning import Config

CONFIGS = [
    Config(block_m, block_n, warps, stages, True, registers)
    for block_m, block_n, warps in ((64, 64, 4), (64, 128, 4), (128, 64, 8), (128, 128, 8), (32, 64, 4))
    for stages in (2, 3)
    for registers in (None, 168)
]
SHAPES = [(64, 32, 2048, True), (64, 32, 8192, True), (128, 16, 2048, True), (128, 16, 8192, True)]


def kernels(head_dim: int, heads: int, length: int, causal: bool) -> dict[str, Callable[[], object]]:
    """One call of every kernel under every configuration, by name; dQ also without counting."""
    sizes = (TOKENS // length, length, heads, head_dim)
    query, key, value, grad = (
        torch.randn(sizes, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(4)
    )
    spec = AttentionSpec(scale=head_dim**-0.5, causal="top_left" if causal else "none")
    modes, state = torch.zeros(heads, dtype=torch.int32, device="cuda"), new_state(heads, "cuda")
    arguments = Arguments(modes, None, None, length, length, None, spec)
    call = call_of(query, key, value, arguments)
    outputs = forward.attention_forward(query, key, value, arguments)
    means = launch_means(call, key, Mode.CENTRED_KEYS, modes, None)
    given = Tensors(grad, query, key, value, *outputs[:4], state, modes, None, None, None, means)
    plain = given._replace(residual=None, state=None, modes=None)
    rows, plain_rows = rows_pass.launch_rows(call, given), rows_pass.launch_rows(call, plain)
    grads = [torch.empty_like(x) for x in (query, key, value)]
    found: dict[str, Callable[[], object]] = {
        "rows": lambda: rows_pass.launch_rows(call, given),
        "rows, no statistics": lambda: rows_pass.launch_rows(call, plain),
        "means": lambda: launch_means(call, key, Mode.CENTRED_KEYS, modes, None),
        "count": lambda: counting.launch_count(call, given, rows, state),
    }
    for config in CONFIGS:
        found[f"forward {tuple(config)}"] = partial(
            forward.launch_forward, call, config, (query, key, value), outputs[:4], arguments
        )
        found[f"dQ {tuple(config)}"] = partial(grad_query.launch_grad_query, call, config, given, rows, grads[0])
        found[f"dQ, no statistics {tuple(config)}"] = partial(
            grad_query.launch_grad_query, call, config, plain, plain_rows, grads[0]
        )
        found[f"dK dV {tuple(config)}"] = partial(
            grad_key.launch_grad_key, call, config, given, rows, (grads[1], grads[2])
        )
    return found


def main() -> None:
    """Print milliseconds, the fastest configurations of each kernel first."""
    stopwatch = Stopwatch(repeats=11)
    for shape in SHAPES:
        calls = kernels(*shape)
        for name in list(calls):
            try:
                calls[name]()
            except Exception as error:  # out of shared memory: not a configuration for this head dim
                print(f"{shape} {name}: {error}", file=sys.stderr)
                del calls[name]
        for name, milliseconds in sorted(stopwatch.medians(calls).items(), key=lambda item: item[1]):
            print(f"D {shape[0]}, S {shape[2]}, {name}: {milliseconds:.4f} ms")


if __name__ == "__main__":
    main()
