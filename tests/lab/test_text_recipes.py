"""Recipes on real text train, with the settings that people train with."""

import math

import pytest
from tests.lab.tiny_recipes import tiny

from foreshock.lab.training.arm import UNTREATED
from foreshock.lab.training.corpus import Corpus, standard_library
from foreshock.lab.training.recipes import Recipe, find_recipe
from foreshock.lab.training.run import Training
from foreshock.lab.training.text_recipes import TEXT_RECIPES


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return standard_library()


@pytest.mark.parametrize("recipe", TEXT_RECIPES, ids=lambda recipe: recipe.name)
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
