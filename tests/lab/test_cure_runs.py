"""The sets of runs that the proof of a cure is made of: what stands beside what."""

import pytest

from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.lab.training.cure_runs import CURES, cure_sets
from foreshock.lab.training.recipes import find_recipe

SETS = cure_sets()


@pytest.mark.parametrize("name", SETS)
def test_each_run_of_a_set_is_named_once_and_each_branch_has_its_trunk_before_it(name: str) -> None:
    names = [entry.name for entry in SETS[name]]
    assert len(set(names)) == len(names)
    made = set()
    for entry in SETS[name]:
        trunk = (entry.recipe.name, entry.arm.name, entry.seed)
        if entry.branch is None:
            made.add(trunk)
        else:
            assert trunk in made


@pytest.mark.parametrize("name", ["cure-explosion", "cure-twenty", "cure-deep"])
def test_each_seed_that_is_left_alone_has_a_control_and_a_switched_twin_or_a_branch(name: str) -> None:
    alone = {(e.recipe.name, e.seed) for e in SETS[name] if e.arm.name in ("untreated", "paper") and e.branch is None}
    controls = {(e.recipe.name, e.seed) for e in SETS[name] if e.arm.name == "control"}
    switched = {(e.recipe.name, e.seed) for e in SETS[name] if e.arm.policy == "auto" or e.branch is not None}
    assert alone <= controls
    assert alone <= switched


def test_the_third_seed_of_the_wide_batch_has_the_default_mode_and_a_control() -> None:
    arms = {e.arm.name: e.arm for e in SETS["cure-text"] if (e.recipe.name, e.seed) == ("kb256b128", 3)}
    assert arms.keys() == {"untreated", "control", f"rescued-all-{DEFAULT_MITIGATION.replace('_', '-')}"}
    assert DEFAULT_MITIGATION in CURES


@pytest.mark.parametrize("recipe", ["shared-values", "paper-values"])
def test_the_deep_twin_of_a_recipe_differs_in_its_layers_alone(recipe: str) -> None:
    plain, deep = find_recipe(recipe), find_recipe(f"{recipe}-deep")
    assert {e.recipe.name for e in SETS["cure-deep"]} >= {deep.name}
    assert (plain.model.layers, deep.model.layers) == (4, 8)
    told, twin = plain.header(SETS["cure-deep"][0].arm, 1, "r"), deep.header(SETS["cure-deep"][0].arm, 1, "r")
    assert {key for key in told if told[key] != twin[key]} <= {"recipe", "layers", "model", "summary", "split"}
    for part in ("batch", "steps", "learning_rate", "warmup_steps", "betas", "clip"):
        assert getattr(plain, part) == getattr(deep, part)
