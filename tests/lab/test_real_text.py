"""The runs on real text: their recipes train, their split was there first, and no run is in both halves."""

import hashlib

import pytest
from tests.lab.tiny_recipes import tiny

from foreshock.lab.sets.real_text import real_text_sets
from foreshock.lab.texts.corpus import Corpus, standard_library
from foreshock.lab.training.arm import CONTROL, CONTROL_AGAIN, UNTREATED
from foreshock.lab.training.real_text_split import SPLIT_FILE, assigned, real_text_split
from foreshock.lab.training.recipes import RECIPES, find_recipe
from foreshock.lab.training.run import Training


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return standard_library()


def test_a_control_made_again_begins_as_the_control_but_for_less_than_rounding(corpus: Corpus) -> None:
    recipe = tiny(find_recipe("kb256"))
    first, again = (Training(recipe, arm, 3, corpus=corpus) for arm in (CONTROL, CONTROL_AGAIN))
    with first.agent, again.agent:
        for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
            assert (one - other).abs().max() <= 1e-5 * one.abs().max()
        assert any(
            not (one == other).all()
            for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True)
        )
        for _ in range(3):  # on the same batches
            assert float(again.advance()) == pytest.approx(float(first.advance()), rel=1e-3)


def test_the_split_is_the_one_that_was_committed_before_any_run() -> None:
    """Whoever changes it after runs exist makes a new split, of new seeds."""
    told = hashlib.sha256(SPLIT_FILE.read_bytes()).hexdigest()
    assert told == "339b056071e0c4e266d30b21054ec88c7138aff1b007c8cda04103e22b969b06"


def test_no_run_is_in_both_halves_and_what_was_looked_at_is_for_tuning() -> None:
    for recipe, halves in real_text_split().items():
        assert recipe in RECIPES
        seeds = [seed for half in halves.values() for seed in half]
        assert len(set(seeds)) == len(seeds)
        assert {assigned(recipe, seed) for seed in halves["held-out"]} <= {"held-out"}
    for recipe, seed in (("kb256", 1), ("kb256", 2), ("kb256b128", 1), ("kb512", 1), ("gpt2-small", 1), ("kb256", 14)):
        assert assigned(recipe, seed) == "tuning"
    assert assigned("kb256", 999) is None
    assert assigned("key-bias-small", 1) is None
    assert find_recipe("kb256").header(UNTREATED, 1, "run")["split"] == "tuning"
    assert find_recipe("kb256").header(UNTREATED, 21, "run")["split"] == "held-out"


def test_the_sets_hold_what_a_reviewer_asks_for() -> None:
    entries = [entry for runs in real_text_sets().values() for entry in runs]
    names = [entry.name for entry in entries]
    assert len(set(names)) == len(names)
    for entry in entries:  # each run that may fail stands beside a control that is as long
        if entry.recipe.truth == "rounding":
            assert f"{entry.recipe.name}_control_seed{entry.seed}" in names
    failing = {e.recipe.name for e in entries if e.recipe.truth == "rounding"}
    on_text = [name for name in failing if find_recipe(name).text == "byte pairs"]
    assert len(failing) >= 5
    assert len(on_text) >= 3
    assert sum(e.recipe.truth == "rounding" and not e.arm.cured for e in entries) >= 24
    for recipe in failing:
        assert sum(e.arm is CONTROL_AGAIN and e.recipe.name == recipe for e in entries) == 2
    healthy = [entry.recipe for entry in entries if entry.recipe.truth_of(entry.arm) == "healthy"]
    assert sum(recipe.steps for recipe in healthy) >= 2_000_000
    assert sum(recipe.steps for recipe in healthy if recipe.model.layers >= 8) >= 1_000_000


def test_a_set_begins_with_one_run_of_every_recipe_so_that_a_leg_gives_some_of_everything() -> None:
    runs = real_text_sets()["real-text"]
    recipes = list(dict.fromkeys(entry.recipe.name for entry in runs))
    first = [entry for entry in runs if entry.arm.name in ("untreated", "paper")][: len(recipes)]
    assert [entry.recipe.name for entry in first] == recipes
