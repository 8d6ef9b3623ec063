"""A recipe: its learning rate by step, what its arms are made to show, and what a trace says of it."""

import math
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.contract.modes import MODES
from foreshock.lab.training.arm import ARMS, CONTROL, UNTREATED, Arm, find_arm
from foreshock.lab.training.recipe import Recipe
from foreshock.lab.training.recipes import RECIPES, find_recipe

KEY_BIAS = find_recipe("key-bias")


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


def test_halfway_down_a_cosine_the_rate_is_between_its_ends() -> None:
    recipe = replace(KEY_BIAS, warmup_steps=100, steps=1100, schedule="cosine")
    assert recipe.rate_share(600) == pytest.approx(0.55)
    assert recipe.rate_share(350) == pytest.approx(0.55 + 0.45 * math.sqrt(0.5))


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS.keys())
def test_only_an_arm_that_rounds_as_the_baseline_does_is_expected_to_fail_by_rounding(arm: Arm) -> None:
    cured = arm.numerics == "float32" or arm.mode != "plain" or bool(arm.model)
    assert KEY_BIAS.truth == "rounding"
    assert KEY_BIAS.truth_of(arm) == ("healthy" if cured else "rounding")
    other = replace(KEY_BIAS, truth="score growth")
    held = arm.qk_clip == "always"  # no rounding was its cause, and no mode cures it
    assert other.truth_of(arm) == ("healthy" if held else "score growth")


def test_a_header_tells_what_a_run_is_and_what_it_switches_to_only_where_it_may_switch() -> None:
    plain = KEY_BIAS.header(UNTREATED, 7, "a-run")
    assert (plain["recipe"], plain["arm"], plain["seed"], plain["run"]) == ("key-bias", "untreated", 7, "a-run")
    assert (plain["nature"], plain["policy"]) == ("natural", "observe")
    assert not {"mitigation", "switch_scope"} & set(plain)
    rescued = KEY_BIAS.header(find_arm("rescued-centred-keys"), 7, "a-run")
    assert (rescued["policy"], rescued["mitigation"]) == ("auto", "centred_keys")


@pytest.mark.parametrize("name", RECIPES)
def test_an_arm_changes_of_a_recipe_what_it_names_and_nothing_else(name: str) -> None:
    recipe = RECIPES[name]
    for arm in (UNTREATED, CONTROL, *(find_arm(mode.name.replace("_", "-")) for mode in MODES)):
        made = recipe.under(arm)
        assert isinstance(made, Recipe)
        assert replace(made, model=recipe.model) == recipe
        wide: Literal["bfloat16", "float32"] = "float32" if arm is CONTROL else "bfloat16"
        assert made.model == replace(recipe.model, attention_dtype=wide)
