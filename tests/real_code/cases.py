"""The cases: public training repositories as they are, each with a tiny model."""

import importlib
import pickle
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from tests.real_code.case import Case, Lines, fused, outside, separate
from torch import Tensor, nn

VOCABULARY: Final = 61
TOKENS: Final = (2, 48)
"""Shape of a batch of words."""


def words(generator: torch.Generator, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Words and the words after them, [B, S], with something to learn: each is likely twice the one before."""
    batch, length = TOKENS
    drawn = torch.randint(vocabulary, (batch, length + 1), generator=generator)
    for place in range(1, length + 1):
        follows = torch.rand(batch, generator=generator) < 0.7
        drawn[:, place] = torch.where(follows, drawn[:, place - 1] * 2 % vocabulary, drawn[:, place])
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def loop(
    lines: Lines,
    model: nn.Module,
    loss_of: Callable[[torch.Generator], Tensor],
    *,
    optimizer: Any = None,
    micro_batches: int = 1,
) -> None:
    """The loop that most repositories have, until all steps are done."""
    model.train()
    lines.attach(model)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(7)
    while True:
        for _ in range(micro_batches):
            loss = loss_of(generator) / micro_batches
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        lines.step(loss.detach() * micro_batches)


def of(module: str) -> Any:
    """A module of the repository: no type checker sees it."""
    return importlib.import_module(module)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Of logits [B, S, V] and words [B, S]."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def script(lines: Lines, path: str, arguments: list[str], added: dict[str, str]) -> None:
    """Run a program of the repository with lines added: each after the only line that begins so."""
    text = Path(path).read_text().splitlines()
    for begins, line in added.items():
        places = [number for number, old in enumerate(text) if old.strip().startswith(begins)]
        if len(places) != 1:
            raise ValueError(f"{path} has {len(places)} lines that begin with {begins!r}; the case needs one")
        old = text[places[0]]
        text.insert(places[0] + 1, old[: len(old) - len(old.lstrip())] + line)
    with tempfile.NamedTemporaryFile("w", suffix=".py", dir=Path(path).parent, delete=False) as program:
        program.write("\n".join(text) + "\n")
    sys.argv = [path, *arguments]
    runpy.run_path(program.name, {"lines": lines}, "__main__")


# ---- nanoGPT, minGPT, nanochat -------------------------------------------------------------------------------------


def _nanogpt(lines: Lines) -> None:
    """Its own train.py and configuration."""
    import numpy as np

    data = Path("data/tiny")
    data.mkdir(exist_ok=True)
    drawn = np.random.default_rng(3).integers(0, VOCABULARY, 4000).astype(np.uint16)
    for split in ("train", "val"):
        drawn.tofile(data / f"{split}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": VOCABULARY}))
    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": 48, "batch_size": 2}
    settings = {"device": "cpu", "dtype": "float32", "compile": False, "dataset": "tiny", "bias": True, "dropout": 0.1}
    steps = {"gradient_accumulation_steps": 2, "eval_iters": 2, "eval_interval": 5}
    script(
        lines,
        "train.py",
        [f"--{name}={value}" for name, value in (sizes | settings | steps).items()],
        {"model.to(device)": "lines.attach(model)", "optimizer.zero_grad(set_to_none=True)": "lines.step(loss * 2)"},
    )


def _mingpt(lines: Lines) -> None:
    """Its own Trainer."""
    gpt, trainers = of("mingpt.model").GPT, of("mingpt.trainer").Trainer

    config = gpt.get_default_config()
    config.model_type, config.n_layer, config.n_head, config.n_embd = None, 3, 4, 32
    config.vocab_size, config.block_size = VOCABULARY, TOKENS[1]
    generator = torch.Generator().manual_seed(7)
    data = [tuple(x[0] for x in words(generator)) for _ in range(64)]
    settings = trainers.get_default_config()
    settings.device, settings.num_workers, settings.batch_size = "cpu", 0, TOKENS[0]
    trainer = trainers(settings, gpt(config), data)
    lines.attach(trainer.model)
    trainer.set_callback("on_batch_end", lambda t: lines.step(t.loss))
    trainer.run()


def _nanochat(lines: Lines) -> None:
    """Its model, on the meta device first as base_train.py has it, and its Muon and AdamW."""
    code = of("nanochat.gpt")

    with torch.device("meta"):
        model = code.GPT(code.GPTConfig(TOKENS[1], VOCABULARY, 4, 4, 2, 64, "SL"))
    model.to_empty(device="cpu")
    model.init_weights()
    loop(lines, model, lambda g: model(*words(g)), optimizer=model.setup_optimizer())


def _modded_nanogpt(lines: Lines) -> None:
    """Its script of track 3 up to where that wants a GPU; then its initialisation, AdamW, Muon and loss on gloo."""
    path = Path("records/track_3_optimization/train_gpt_simple.py")
    sys.argv = [str(path)]
    code: dict[str, Any] = {}
    exec(path.read_text().partition('device = torch.device("cuda"')[0], code)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    model = code["GPT"](vocab_size=VOCABULARY, num_layers=3, model_dim=256)
    for name, parameter in model.named_parameters():
        if "proj" in name or name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif name.endswith("weight"):
            nn.init.normal_(parameter, std=1 if "embed" in name else 0.33**0.5 / parameter.shape[-1] ** 0.5)
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if all(parameter is not matrix for matrix in matrices)]
    optimizers = torch.optim.AdamW(others, 0.004), code["Muon"](matrices, lr=0.025, weight_decay=0.05)
    lines.attach(model)
    generator = torch.Generator().manual_seed(7)
    while True:
        loss = model(*words(generator))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        lines.step(loss)


# ---- torchtitan, litgpt, lingua, OLMo-core, x-transformers ---------------------------------------------------------


def _litgpt(name: str, **given: Any) -> Callable[[Lines], None]:
    def train(lines: Lines) -> None:
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "block_size": 64, "padded_vocab_size": 64}
        model = of("litgpt.model").GPT(of("litgpt.config").Config.from_name(name, **sizes, **given))
        model.apply(model._init_weights)

        def loss_of(generator: torch.Generator) -> Tensor:
            tokens, targets = words(generator)
            return cross_entropy(model(tokens), targets)

        loop(lines, model, loss_of)

    return train


def _lingua(lines: Lines) -> None:
    import types

    # Its forward takes PyTorch's attention here; of xformers it needs the names.
    sys.modules["xformers"] = types.ModuleType("xformers")
    sys.modules["xformers.ops"] = operators = types.ModuleType("xformers.ops")
    operators.fmha, operators.AttentionBias = None, type("AttentionBias", (), {})  # type: ignore[attr-defined]
    code = of("apps.main.transformer")

    model = code.LMTransformer(
        code.LMTransformerArgs(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=VOCABULARY, max_seqlen=64)
    )
    model.init_weights()
    loop(lines, model, lambda g: model(*words(g)), micro_batches=2)


def _olmo(**given: Any) -> Callable[[Lines], None]:
    def train(lines: Lines) -> None:
        config = of("olmo_core.nn.transformer").TransformerConfig.llama_like(
            d_model=32, vocab_size=64, n_layers=3, n_heads=4, n_kv_heads=2, hidden_size_multiple_of=32, **given
        )
        model = config.build(init_device="cpu")
        model.init_weights(max_seq_len=64, device=torch.device("cpu"))

        def loss_of(generator: torch.Generator) -> Tensor:
            tokens, targets = words(generator)
            return cross_entropy(model(tokens), targets)

        loop(lines, model, loss_of)

    return train


def _torchtitan(name: str, **given: Any) -> Callable[[Lines], None]:
    def train(lines: Lines) -> None:
        models = of(f"torchtitan.models.{name}")
        # Its other backends do not train on a CPU; its own tests build this one.
        build = of("torchtitan.experiments.graph_trainer.common_utils").build_decoder_config_for_backend
        model = build(getattr(models, f"{name}_configs")["debugmodel"], "sdpa", **given).build()
        model.init_states()

        def loss_of(generator: torch.Generator) -> Tensor:  # one row of tokens, as its trainer packs them
            tokens, targets = (each.flatten() for each in words(generator))
            return cross_entropy(model(tokens, positions=torch.arange(len(tokens)))[None], targets)

        loop(lines, model, loss_of)

    return train


def _x_transformers(**given: Any) -> Callable[[Lines], None]:
    def train(lines: Lines) -> None:
        code = of("x_transformers")
        layers = code.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **given)
        model = of("x_transformers.autoregressive_wrapper").AutoregressiveWrapper(
            code.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=TOKENS[1], attn_layers=layers)
        )
        loop(lines, model, lambda g: model(words(g)[0]))

    return train


# ---- images and sound ----------------------------------------------------------------------------------------------


def _dit(lines: Lines) -> None:
    """Its model and its diffusion loss."""
    model = of("models").DiT(input_size=8, patch_size=2, hidden_size=32, depth=3, num_heads=4, num_classes=10)
    diffusion = of("diffusion").create_diffusion(timestep_respacing="")

    def loss_of(generator: torch.Generator) -> Tensor:
        images = torch.randn(2, 4, 8, 8, generator=generator)
        times = torch.randint(diffusion.num_timesteps, (2,), generator=generator)
        classes = torch.randint(10, (2,), generator=generator)
        loss: Tensor = diffusion.training_losses(model, images, times, {"y": classes})["loss"].mean()
        return loss

    loop(lines, model, loss_of)


def _whisper(lines: Lines) -> None:
    code = of("whisper.model")
    model = code.Whisper(code.ModelDimensions(8, 16, 32, 4, 2, VOCABULARY, TOKENS[1], 32, 4, 2))
    nn.init.normal_(model.decoder.positional_embedding, std=0.02)  # its class leaves it as memory has it

    def loss_of(generator: torch.Generator) -> Tensor:
        tokens, targets = words(generator)
        return cross_entropy(model(torch.randn(TOKENS[0], 8, 32, generator=generator), tokens), targets)

    loop(lines, model, loss_of)


def _timm(lines: Lines) -> None:
    model = of("timm.models.vision_transformer").VisionTransformer(
        16, 4, num_classes=10, embed_dim=32, depth=2, num_heads=4, drop_path_rate=0.1
    )

    def loss_of(generator: torch.Generator) -> Tensor:
        images = torch.randn(4, 3, 16, 16, generator=generator)
        return nn.functional.cross_entropy(model(images), torch.randint(10, (4,), generator=generator))

    loop(lines, model, loss_of)


_ALL: Final = (
    Case(
        name="nanogpt",
        repository="karpathy/nanoGPT",
        model="its train.py: dropout, two micro-batches, evaluation",
        train=_nanogpt,
        layers=3,
        dropout=True,
        says=(r"3 of 3 layers use dropout\. Their masks stay the model's own until a switch\.",),
        rows=fused("c_attn.weight", width=8, heads=4),
    ),
    Case(
        name="mingpt",
        repository="karpathy/minGPT",
        model="its Trainer",
        train=_mingpt,
        layers=3,
        watched=0,
        switch="no head",
        says=("computes its attention by hand",),
    ),
    Case(
        name="nanochat",
        repository="karpathy/nanochat",
        model="GPT, window and full, MuonAdamW",
        train=_nanochat,
        layers=4,
        key_heads=2,
        says=(r"norms are not measured: in no known order do the outputs of its projections \(c_q, c_k\)",),
    ),
    Case(
        name="modded-nanogpt",
        repository="KellerJordan/modded-nanogpt",
        model="script of track 3, bf16, AdamW and Muon on gloo",
        train=_modded_nanogpt,
        layers=3,
        heads=2,
        key_heads=2,
        says=(
            r"Drift by rounding: perhaps\. The keys have a bias, besides rotary positions",
            r"norms are not measured: in no known order do the outputs of its projections \(q, k\)",
        ),
    ),
    Case(
        name="torchtitan-llama3",
        repository="pytorch/torchtitan",
        model="Llama 3, with the attention of its graph trainer's tests",
        train=_torchtitan("llama3"),
        layers=6,
        heads=16,
        key_heads=16,
        rows=separate("qkv_linear.wq.weight", "qkv_linear.wk.weight", width=16),
    ),
    Case(
        name="litgpt-pythia",
        repository="Lightning-AI/litgpt",
        model="Pythia",
        train=_litgpt("pythia-14m"),
        layers=2,
        rows=fused("qkv.weight", width=8, heads=4),
    ),
    Case(
        name="litgpt-qwen3",
        repository="Lightning-AI/litgpt",
        model="Qwen3, grouped heads, norms of queries and keys",
        train=_litgpt("Qwen3-0.6B", n_query_groups=2, head_size=8, intermediate_size=64),
        layers=2,
        key_heads=2,
        says=("norms are not measured: its queries and keys are normalised",),
    ),
    Case(
        name="litgpt-llama",
        repository="Lightning-AI/litgpt",
        model="Llama 3.2, grouped heads",
        train=_litgpt("Llama-3.2-1B", n_query_groups=2, head_size=8, intermediate_size=64),
        layers=2,
        key_heads=2,
        rows=fused("qkv.weight", width=8, heads=4, group=2),
    ),
    Case(
        name="litgpt-gemma2",
        repository="Lightning-AI/litgpt",
        model="Gemma 2, soft cap by hand",
        train=_litgpt("Gemma-2-2b", n_query_groups=2, head_size=8, intermediate_size=64),
        layers=2,
        watched=0,
        key_heads=2,
        switch="no head",
        says=("computes its attention by hand",),
    ),
    Case(
        name="x-transformers",
        repository="lucidrains/x-transformers",
        model="Decoder with attn_flash, rotary",
        train=_x_transformers(attn_flash=True, rotary_pos_emb=True),
        layers=2,
        rows=separate("to_q.weight", "to_k.weight", width=8),
    ),
    Case(
        name="x-transformers-default",
        repository="lucidrains/x-transformers",
        model="Decoder as train_enwik8.py has it, attention by hand",
        train=_x_transformers(polar_pos_emb=True, pre_and_post_norm=True),
        layers=2,
        watched=0,
        switch="no head",
        says=("computes its attention by hand",),
    ),
    Case(
        name="lingua",
        repository="facebookresearch/lingua",
        model="LMTransformer, grouped heads repeated, two micro-batches",
        train=_lingua,
        layers=3,
        key_heads=2,
        rows=separate("wq.weight", "wk.weight", width=8, group=2),
    ),
    Case(
        name="olmo-core",
        repository="allenai/OLMo-core",
        model="llama_like, grouped heads",
        train=_olmo(),
        layers=3,
        key_heads=2,
        rows=outside(".backend", separate("w_q.weight", "w_k.weight", width=8, group=2)),
        folder="src",
    ),
    Case(
        name="olmo-core-qk-norm",
        repository="allenai/OLMo-core",
        model="llama_like, norms of queries and keys",
        train=_olmo(qk_norm=True),
        layers=3,
        key_heads=2,
        says=("norms are not measured: its queries and keys are normalised",),
        folder="src",
    ),
    Case(
        name="dit",
        repository="facebookresearch/DiT",
        model="DiT, its diffusion loss",
        train=_dit,
        layers=3,
        rows=fused("qkv.weight", width=8, heads=4),
    ),
    Case(
        name="whisper",
        repository="openai/whisper",
        model="Whisper: encoder, decoder, cross attention",
        train=_whisper,
        layers=6,
        rows=separate("query.weight", "key.weight", width=8),
    ),
    Case(
        name="timm",
        repository="huggingface/pytorch-image-models",
        model="ViT with drop path",
        train=_timm,
        layers=2,
        rows=fused("qkv.weight", width=8, heads=4),
    ),
)
CASES: Final = {case.name: case for case in _ALL}
