"""Training recipes and variants: reproducible by seed, and a checkpoint can continue under another variant."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreshock.contract import wire
from foreshock.contract.modes import MODES
from foreshock.contract.slots import Slot, Words
from foreshock.lab.texts import VOCABULARIES, Corpus, standard_library
from foreshock.lab.training.model import GPT, ModelConfig
from foreshock.lab.training.recipes import RECIPES, Recipe, find_recipe, read_recipes
from foreshock.lab.training.run import Training
from foreshock.lab.training.variant import CONTROL, UNTREATED, VARIANTS, Variant, find_variant

SHAPE = ModelConfig(layers=2, heads=4, width=32, context=16)
TINY = replace(find_recipe("key-bias-small"), model=SHAPE, batch=4, sample_every_steps=5)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return standard_library()


Begin = Callable[..., Training]


@pytest.fixture
def begin(corpus: Corpus) -> Iterator[Begin]:
    """Starts a tiny training; the test closes its agent at the end."""
    trainings: list[Training] = []

    def start(recipe: Recipe = TINY, variant: Variant = UNTREATED, seed: int = 1, **settings: Any) -> Training:
        trainings.append(Training(recipe, variant, seed, corpus=corpus, **settings))
        return trainings[-1]

    yield start
    for training in reversed(trainings):
        training.agent.close("stopped")


def losses(training: Training, steps: int) -> list[float]:
    return [float(training.advance()) for _ in range(steps)]


def collect_words(training: Training) -> list[Words]:
    """Collects the words of every sample from now on."""
    found: list[Words] = []

    def collect(event: wire.Event) -> None:
        if isinstance(event, wire.Sample) and (words := event.words()) is not None:
            found.append(words)

    training.agent.subscribe(collect)
    return found


def test_training_is_determined_by_its_seed(begin: Begin) -> None:
    first, again, other = (losses(begin(seed=seed), 6) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_control_trains_equally_with_pytorchs_and_foreshocks_attention(begin: Begin) -> None:
    """On a GPU, PyTorch uses its memory-efficient kernel, here its CPU kernel; only float32 rounding differs."""
    pytorch_run, foreshock_run = (
        begin(variant=CONTROL, seed=3, attention=attention) for attention in ("keep", "kernels")
    )
    samples = collect_words(foreshock_run)
    assert losses(pytorch_run, 40) == pytest.approx(losses(foreshock_run, 40), rel=2e-5)
    weights = zip(pytorch_run.model.parameters(), foreshock_run.model.parameters(), strict=True)
    assert all(torch.allclose(a, b, atol=2e-3, rtol=1e-2) for a, b in weights)
    assert samples


def test_branch_is_identical_to_its_trunk_until_a_head_is_switched(begin: Begin) -> None:
    trunk = begin(seed=3)
    losses(trunk, 10)
    checkpoint = copy.deepcopy(trunk.checkpoint())
    branch, switched = (begin(variant=find_variant("rescued"), seed=99) for _ in range(2))
    branch.restore(copy.deepcopy(checkpoint))
    switched.restore(checkpoint)
    expected = losses(trunk, 10)
    assert losses(branch, 10) == expected
    switched.agent.set_mode(switched.agent.modes(), "exact_delta", reason="test")
    assert losses(switched, 10) != expected
    assert branch.step == trunk.step == 20


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_heads": 2, "rotary": True, "qkv_bias": False},
        {"kv_heads": 1, "rotary": True, "matmul_dtype": "bfloat16"},
        {"kv_heads": 2, "rotary": True, "qkv_bias": False, "norm": "rms", "gated": True},
    ],
)
def test_model_shape_learns_and_every_row_of_every_query_head_is_counted(changes: dict[str, Any], begin: Begin) -> None:
    training = begin(replace(TINY, model=replace(SHAPE, **changes)))
    words = collect_words(training)
    course = losses(training, 30)
    training.agent.close("completed")
    assert sum(course[-5:]) < sum(course[:5])
    assert np.sum([each[:, Slot.ROWS] for each in words], axis=0).tolist() == [30 * 4 * 16] * 8


@given(warmup=st.integers(1, 400), more=st.integers(0, 4000), schedule=st.sampled_from(["constant", "cosine"]))
def test_learning_rate_warms_up_linearly_and_decays_only_with_cosine(warmup: int, more: int, schedule: Any) -> None:
    recipe = replace(TINY, warmup_steps=warmup, steps=warmup + more, schedule=schedule)
    for step in range(1, warmup, max(1, warmup // 7)):
        assert recipe.rate_share(step) == pytest.approx(step / warmup)
    later = [recipe.rate_share(step) for step in range(warmup, warmup + more + 1, max(1, more // 11))]
    assert later[0] == pytest.approx(1.0)
    assert all(0.01 - 1e-9 <= share <= 1 + 1e-9 for share in later)
    assert later == sorted(later, reverse=True)
    end = recipe.rate_share(recipe.steps + 50)
    assert end == pytest.approx(1.0 if schedule == "constant" else 0.01 if more else end)


def test_recipe_inherits_from_its_base_and_rejects_invalid_fields() -> None:
    base = """
        [first]
        summary = "One."
        batch = 2
        steps = 3
        learning_rate = 0.1
        warmup_steps = 1
        clip = 2.0
        model = {layers = 1, heads = 2, width = 8, context = 4}
    """
    first, second = read_recipes(base + "[second]\nbase = 'first'\nmodel = {heads = 4}").values()
    assert second == replace(first, name="second", model=replace(first.model, heads=4))
    for wrong in ("rate = 1", "model = {wide = 8}", "batch = 'many'", "model = {heads = 3}", "model = {kv_heads = 3}"):
        with pytest.raises(ValueError, match=r"rate|wide|batch|width 8 is not a multiple of 3|cannot share 3"):
            read_recipes(f"{base}[second]\nbase = 'first'\n{wrong}")


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_recipe_trains_at_small_size(recipe: Recipe, begin: Begin) -> None:
    kv_heads = 2 if recipe.model.kv_heads else None
    sizes: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": kv_heads, "width": 32, "context": 16}
    paper = recipe.name.startswith("paper-gpt2")
    model, micro_batch = replace(recipe.model, vocabulary=256, **sizes), 2 if paper else None
    small = replace(recipe, model=model, batch=4, micro_batch=micro_batch, steps=40, warmup_steps=4)
    course = losses(begin(small, find_variant("flash-untreated" if paper else "untreated")), 12)
    assert all(map(math.isfinite, course))
    assert min(course[6:]) < course[0]


def test_paper_recipe_matches_the_published_settings() -> None:
    paper = find_recipe("paper-gpt2")
    assert paper.batch * paper.model.context == 524_288
    assert (paper.learning_rate, paper.warmup_steps, paper.betas, paper.clip) == (1e-3, 2000, (0.9, 0.95), 1.0)
    assert (paper.weight_decay, paper.model.qkv_bias, paper.compiled) == (0.0, False, True)
    rates = [paper.learning_rate * paper.rate_share(step) for step in (1, 1000, 2000, 301_000, 600_000, 700_000)]
    assert rates == pytest.approx([5e-7, 5e-4, 1e-3, 5.05e-4, 1e-5, 1e-5])
    assert paper.model.vocabulary >= VOCABULARIES["folders"]
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in GPT(paper.model).parameters())
    assert weights == 50_304 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 2 * 768) + 768


def test_model_predictions_depend_only_on_earlier_tokens() -> None:
    torch.manual_seed(0)
    model = GPT(ModelConfig(layers=1, heads=2, width=8, context=6, attention_dtype="float32"))
    tokens = torch.randint(256, (1, 6))
    targets = torch.full((1, 6), -100)
    targets[0, 2] = 7
    changed = tokens.clone()
    changed[0, 3:] = 1
    assert torch.equal(model(tokens, targets), model(changed, targets))


MODE_NAMES = [mode.name for mode in MODES]


def test_every_mode_is_a_variant_and_unknown_variants_are_rejected() -> None:
    assert [find_variant(name.replace("_", "-")).mode for name in MODE_NAMES] == MODE_NAMES
    with pytest.raises(ValueError, match=r"variant 'baseline' does not exist; allowed are untreated, rescued, control"):
        find_variant("baseline")


def test_header_records_variant_seed_policy_and_expected_outcome() -> None:
    recipe = find_recipe("kb256")
    headers = {name: recipe.header(variant, 7, "a-run") for name, variant in VARIANTS.items()}
    plain, rescued = headers["untreated"], headers["rescued"]
    assert (plain["arm"], plain["seed"], plain["nature"], plain["policy"]) == ("untreated", 7, "natural", "observe")
    assert rescued["policy"] == "auto"
    healthy = {name for name, header in headers.items() if header["truth"] == "healthy"}
    assert healthy == {"control", "paper-no-key-bias"} | {n.replace("_", "-") for n in MODE_NAMES if n != "plain"}


def test_variant_without_key_bias_keeps_the_bias_at_zero(begin: Begin) -> None:
    training = begin(variant=find_variant("paper-no-key-bias"))
    losses(training, 3)
    biases = [p for name, p in training.model.named_parameters() if name.endswith("c_attn.bias")]
    assert [float(bias[32:64].detach().abs().max()) for bias in biases] == [0.0, 0.0]
    assert all(float(bias[:32].detach().abs().max()) > 0 for bias in biases)
