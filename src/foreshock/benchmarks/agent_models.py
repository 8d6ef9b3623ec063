"""The models whose training steps are timed: the laboratory's, as large as GPT-2 small and Llama 1B."""

from dataclasses import dataclass
from typing import Final

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foreshock.lab.training.model import CausalSelfAttention, ModelConfig
from foreshock.monitor.model.discovery import SDPA

BACKENDS: Final = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and its batch of whole contexts."""

    name: str
    model: ModelConfig
    batch: int
    whole: bool
    """torch.compile over the whole model; else layer by layer, as large models are compiled."""
    block_steps: int = 10
    device: str = "cuda"


_GPT2 = ModelConfig(layers=12, heads=12, width=768, context=1024, vocabulary=50_304, matmul_dtype="bfloat16")
_LLAMA = ModelConfig(
    layers=16,
    heads=32,
    kv_heads=8,
    width=2048,
    hidden=8192,
    context=4096,
    vocabulary=128_256,
    qkv_bias=False,
    rotary=True,
    norm="rms",
    gated=True,
    matmul_dtype="bfloat16",
)
_MINI = ModelConfig(
    layers=6, heads=6, width=384, context=256, vocabulary=4096, attention_dtype="float32", matmul_dtype="float32"
)
SHAPES: Final = (
    Shape("gpt2-small", _GPT2, 32, whole=True, block_steps=20),
    Shape("llama-1b", _LLAMA, 4, whole=False),
    Shape("gpt2-mini", _MINI, 4, whole=True, device="cpu"),
)


class NativeAttention(CausalSelfAttention):
    """By one of PyTorch's backends, in a call that `attach` finds."""

    backend: SDPBackend

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The backend is chosen inside the graph: torch.compile does not look outside."""
        with sdpa_kernel(self.backend):
            return super().core(query, key, value)


class UnwatchedAttention(NativeAttention):
    """The same by PyTorch's own function, whatever its name is bound to while an agent is attached."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As in NativeAttention."""
        with sdpa_kernel(self.backend):
            return SDPA(query, key, value, is_causal=True, enable_gqa=self.n_head != self.n_kv_head)
