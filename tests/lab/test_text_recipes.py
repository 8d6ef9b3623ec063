"""Recipes on real text train, with the settings that people train with."""

import math
from dataclasses import replace

import pytest
from tests.lab.tiny_recipes import tiny

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.lab.sets.published_runs import published
from foreshock.lab.texts.corpus import Corpus, standard_library
from foreshock.lab.training.arm import UNTREATED, find_arm
from foreshock.lab.training.recipes import Recipe, find_recipe
from foreshock.lab.training.run import Training
from foreshock.lab.training.text_recipes import RATES, TEXT_RECIPES


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return standard_library()


@pytest.mark.parametrize("recipe", [*TEXT_RECIPES, *RATES], ids=lambda recipe: recipe.name)
def test_every_recipe_on_real_text_trains_at_a_small_size(recipe: Recipe, corpus: Corpus) -> None:
    training = Training(tiny(recipe), UNTREATED, 5, corpus=corpus)
    with training.agent:
        course = [float(training.advance()) for _ in range(12)]
    assert all(map(math.isfinite, course))
    assert min(course[6:]) < course[0]


def test_the_settings_are_those_that_people_train_with() -> None:
    assert all(recipe.model.value_offset == 0.0 for recipe in TEXT_RECIPES)
    on_gpu = [recipe for recipe in TEXT_RECIPES if recipe.on_gpu]
    assert {recipe.batch for recipe in on_gpu} == {16, 32, 64, 128}
    assert min(recipe.learning_rate for recipe in on_gpu) == 3e-4
    assert max(recipe.learning_rate for recipe in on_gpu) == 2e-3
    assert {recipe.optimizer for recipe in on_gpu} == {"adamw", "muon"}
    llamas = [
        r.model for r in on_gpu if r.model.rotary and r.model.gated and r.model.norm == "rms" and r.model.kv_heads
    ]
    assert {(model.qk_norm, model.qkv_bias) for model in llamas} == {(False, False), (True, False), (False, True)}
    small = find_recipe("gpt2-small")
    assert (small.model.layers, small.model.width, small.model.context, small.clip) == (12, 768, 1024, 1.0)


def test_the_runs_with_qk_clip_have_a_rate_that_fails_and_others_that_do_not_with_and_without_a_falling_rate() -> None:
    kb256 = find_recipe("kb256")
    for recipe in RATES:
        assert replace(recipe.model, qkv_bias=True) == kb256.model
        assert (recipe.truth == "score growth") == (recipe.learning_rate == 32e-3)
    assert {(r.learning_rate, r.schedule) for r in RATES} == {
        (rate, schedule) for rate in (4e-3, 8e-3, 32e-3) for schedule in ("constant", "cosine")
    }
    entries = published()["qk-clip"]
    assert len({entry.name for entry in entries}) == len(entries) == 5 * 2 * 6
    clipped = {entry.arm.qk_clip for entry in entries if entry.recipe.truth == "score growth"}
    assert clipped == {"never", "always", "warned"}


def test_qk_clip_holds_the_scores_of_a_run_of_the_laboratory(corpus: Corpus) -> None:
    small = tiny(replace(find_recipe("no-bias-32e-3"), learning_rate=0.03))
    scores = {}
    for arm in (UNTREATED, find_arm("qk-clip")):
        training = Training(small, arm, 5, corpus=corpus, qk_clip_threshold=4.0)
        seen: list[wire.Event] = []
        training.agent.subscribe(seen.append)
        with training.agent:
            for _ in range(60):
                training.advance()
        samples = [event.words() for event in seen if isinstance(event, wire.Sample)]
        words = [each for each in samples if each is not None]
        scores[arm.name] = float(slot_values(words[-1], Slot.SCORE_MAX).max())
    assert scores["untreated"] > 40
    assert scores["qk-clip"] < 12
