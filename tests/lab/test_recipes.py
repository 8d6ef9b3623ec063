"""Recipes: what they may say of a run, what a variant changes of it, and that each of them trains."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.tiny_recipes import tiny

from foreshock.contract import wire
from foreshock.contract.slots import Slot
from foreshock.lab.texts import FOLDER_VOCABULARY, Corpus, standard_library
from foreshock.lab.training.model import GPT, ModelConfig
from foreshock.lab.training.recipes import RECIPES, Recipe, Truth, find_recipe, read_recipes
from foreshock.lab.training.run import Training
from foreshock.lab.training.variant import UNTREATED, Variant, find_variant

SHAPE = ModelConfig(layers=2, heads=4, width=32, context=16)
KEY_BIAS = find_recipe("kb256")
TINY = replace(find_recipe("key-bias-small"), model=SHAPE, batch=4, sample_every_steps=5)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return standard_library()


def losses(recipe: Recipe, corpus: Corpus, steps: int, variant: Variant = UNTREATED) -> list[float]:
    training = Training(recipe, variant, 1, corpus=corpus)
    with training.agent:
        return [float(training.advance()) for _ in range(steps)]


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_heads": 2, "rotary": True, "qkv_bias": False},
        {"qk_norm": True},
        {"kv_heads": 1, "qk_norm": True, "rotary": True, "matmul_dtype": "bfloat16"},
        {"value_offset": 2.0},
        {"kv_heads": 2, "rotary": True, "qkv_bias": False, "norm": "rms", "gated": True, "qk_norm": True},
    ],
)
def test_a_shape_learns_and_every_row_of_every_query_head_is_counted(changes: dict[str, Any], corpus: Corpus) -> None:
    recipe = replace(TINY, model=replace(SHAPE, **changes))
    training = Training(recipe, UNTREATED, 1, corpus=corpus)
    samples: list[wire.Event] = []
    training.agent.subscribe(samples.append)
    with training.agent:
        course = [float(training.advance()) for _ in range(30)]
    assert sum(course[-5:]) < sum(course[:5])
    words = [event.words() for event in samples if isinstance(event, wire.Sample)]
    rows = sum(each[:, Slot.ROWS] for each in words if each is not None)
    assert rows.tolist() == [30 * 4 * 16] * 8  # type: ignore[union-attr]


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(corpus: Corpus) -> None:
    training = Training(replace(TINY, optimizer="muon"), UNTREATED, 1, corpus=corpus)
    with training.agent:
        adamw, muon = training.optimizers
        matrices = [p for group in muon.param_groups for p in group["params"]]
        assert len(matrices) == 8
        others = sum(len(group["params"]) for group in adamw.param_groups)
        assert others + 8 == len(list(training.model.parameters()))
        course = [float(training.advance()) for _ in range(9)]
    assert course[-1] < course[0]


@pytest.mark.parametrize(
    ("changes", "apart", "field", "values"),
    [
        ({"bias_rate": 8.0}, "c_attn.bias", "lr", (1e-3, 8e-3)),
        ({"bias_decay": 0.1}, ("c_attn.bias", "ln_1.weight", "ln_2.weight", "ln_f.weight"), "weight_decay", (0.0, 0.1)),
    ],
    ids=["rate", "decay"],
)
def test_biases_may_learn_at_a_rate_and_vectors_with_a_decay_of_their_own(
    changes: dict[str, float], apart: str | tuple[str, ...], field: str, values: tuple[float, float], corpus: Corpus
) -> None:
    recipe = replace(TINY, learning_rate=1e-3, warmup_steps=1, **changes)  # type: ignore[arg-type]
    training = Training(recipe, UNTREATED, 0, corpus=corpus)
    with training.agent:
        training.advance()
    groups = training.optimizer.param_groups
    assert tuple(group[field] for group in groups) == values
    names = {id(p): name for name, p in training.model.named_parameters()}
    others, own = ({names[id(p)] for p in group["params"]} for group in groups)
    assert own == {name for name in names.values() if name.endswith(apart)}
    assert others == set(names.values()) - own


def test_biases_have_a_rate_or_a_decay_of_their_own_but_not_both(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="gives both bias_rate and bias_decay"):
        Training(replace(TINY, bias_rate=8.0, bias_decay=0.1), UNTREATED, 0, corpus=corpus)


def test_a_cosine_rises_to_the_rate_and_ends_at_a_tenth_of_it(corpus: Corpus) -> None:
    recipe = replace(TINY, schedule="cosine", warmup_steps=4, steps=14)
    told: list[float | None] = []
    training = Training(replace(recipe, sample_every_steps=1), UNTREATED, 1, corpus=corpus)
    training.agent.subscribe(lambda event: told.append(event.learning_rate) if isinstance(event, wire.Sample) else None)
    with training.agent:
        rates = []
        for _ in range(14):
            training.advance()
            rates.append(float(training.optimizer.param_groups[0]["lr"]) / recipe.learning_rate)
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[8] == pytest.approx(0.55)  # half way
    assert rates[-1] == pytest.approx(0.1)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert told[-1] == pytest.approx(recipe.learning_rate / 10)


def test_a_recipe_takes_from_its_base_what_it_does_not_name() -> None:
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
    first, second = read_recipes(base + "[second]\nbase = 'first'\nclip = 'none'\nmodel = {heads = 4}").values()
    assert second == replace(first, name="second", clip=None, model=replace(first.model, heads=4))
    for wrong in ("rate = 1", "model = {wide = 8}", "batch = 'many'", "model = {heads = 3}"):
        with pytest.raises(ValueError, match=r"rate|wide|batch|width 8 is not a multiple of 3"):
            read_recipes(f"{base}[second]\nbase = 'first'\n{wrong}")


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_recipe_trains_at_a_small_size(recipe: Recipe, corpus: Corpus) -> None:
    paper = recipe.name.startswith("paper-gpt2")
    small, variant = (
        replace(tiny(recipe), micro_batch=2 if paper else None),
        "flash-untreated" if paper else "untreated",
    )
    course = losses(small, corpus, 12, find_variant(variant))
    assert all(map(math.isfinite, course))
    assert min(course[6:]) < course[0]


@given(warmup=st.integers(1, 400), more=st.integers(0, 4000), schedule=st.sampled_from(["constant", "cosine"]))
def test_a_rate_rises_in_a_line_never_leaves_its_bounds_and_falls_only_under_a_cosine(
    warmup: int, more: int, schedule: str
) -> None:
    recipe = replace(KEY_BIAS, warmup_steps=warmup, steps=warmup + more, schedule=schedule)  # type: ignore[arg-type]
    for step in range(1, warmup, max(1, warmup // 7)):
        assert recipe.rate_share(step) == pytest.approx(step / warmup)
    later = [recipe.rate_share(step) for step in range(warmup, warmup + more + 1, max(1, more // 11))]
    assert later[0] == pytest.approx(1.0)
    assert all(0.1 - 1e-9 <= share <= 1 + 1e-9 for share in later)
    assert later == sorted(later, reverse=True)
    end = recipe.rate_share(recipe.steps + 50)
    assert end == pytest.approx(1.0 if schedule == "constant" else 0.1 if more else end)


@pytest.mark.parametrize(
    ("failure", "held_by"),
    [("rounding", {"control", "exact-delta", "paper-no-key-bias"}), ("score growth", {"qk-clip"})],
)
def test_a_recipe_is_not_expected_to_fail_where_its_cause_is_kept_away(failure: Truth, held_by: set[str]) -> None:
    recipe = replace(KEY_BIAS, truth=failure)
    tried = {
        "untreated",
        "rescued",
        "paper",
        "control",
        "exact-delta",
        "paper-no-key-bias",
        "qk-clip",
        "qk-clip-warned",
    }
    assert {name for name in tried if recipe.truth_of(find_variant(name)) == "healthy"} == held_by
    assert {recipe.truth_of(find_variant(name)) for name in tried - held_by} == {failure}


def test_a_header_tells_what_a_run_is_and_what_it_switches_to_only_where_it_may_switch() -> None:
    plain = KEY_BIAS.header(UNTREATED, 7, "a-run")
    assert (plain["recipe"], plain["arm"], plain["seed"], plain["run"]) == ("kb256", "untreated", 7, "a-run")
    assert (plain["nature"], plain["policy"], plain["steps"]) == ("natural", "observe", 14_000)
    assert not {"mitigation", "switch_scope"} & set(plain)
    rescued = KEY_BIAS.header(find_variant("rescued-paper-softmax"), 7, "a-run")
    assert (rescued["policy"], rescued["mitigation"]) == ("auto", "paper_softmax")


def test_the_settings_are_those_of_the_paper_and_of_its_authors_program() -> None:
    paper = find_recipe("paper-gpt2")
    assert paper.batch * paper.model.context == 524_288
    assert (paper.learning_rate, paper.warmup_steps, paper.betas, paper.clip) == (1e-3, 2000, (0.9, 0.95), 1.0)
    assert (paper.weight_decay, paper.model.qkv_bias, paper.compiled) == (0.0, False, True)
    rates = [paper.learning_rate * paper.rate_share(step) for step in (1, 1000, 2000, 301_000, 600_000, 700_000)]
    assert rates == pytest.approx([5e-7, 5e-4, 1e-3, 5.05e-4, 1e-5, 1e-5])
    assert paper.model.vocabulary >= FOLDER_VOCABULARY
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in GPT(paper.model).parameters())
    assert weights == 50_304 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 2 * 768) + 768
