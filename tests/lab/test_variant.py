"""Variants are made of names: of those in the list, and of any mode with what is done with it before it."""

import pytest

from foreshock.contract.modes import MODES, is_mode
from foreshock.lab.training.variant import UNTREATED, VARIANTS, find_variant, shown_name

MODE_NAMES = [mode.name for mode in MODES]
UNION = "paper-softmax+row-corrected"


@pytest.mark.parametrize("name", [*(name.replace("_", "-") for name in MODE_NAMES), UNION])
def test_a_mode_names_an_arm_that_has_it_from_the_first_step_or_switches_to_it_at_a_warning(name: str) -> None:
    mode = name.replace("-", "_")
    assert is_mode(mode)
    whole, one, every = find_variant(name), find_variant(f"rescued-{name}"), find_variant(f"rescued-all-{name}")
    assert (whole.mode, whole.policy) == (mode, "observe")
    assert (one.mode, one.policy, one.mitigation, one.switch_scope) == ("plain", "auto", mode, "head")
    assert (every.mode, every.policy, every.mitigation, every.switch_scope) == ("plain", "auto", mode, "model")
    for variant in (whole, one, every):
        paper = find_variant(f"paper-{variant.name}")
        assert (variant.numerics, paper.numerics) == ("kernel", "paper")
        assert (paper.mode, paper.policy, paper.switch_scope) == (variant.mode, variant.policy, variant.switch_scope)


def test_every_arm_of_the_list_is_found_by_its_name_and_people_read_of_a_baseline() -> None:
    assert [find_variant(name).name for name in VARIANTS] == list(VARIANTS)
    assert shown_name(UNTREATED.name) == "baseline"
    assert all(shown_name(name) == name for name in VARIANTS if name != UNTREATED.name)


def test_cured_from_the_first_step_are_float32_modes_and_a_model_without_the_key_bias() -> None:
    cured = {name for name, variant in VARIANTS.items() if variant.cured}
    told = {name.replace("_", "-") for name in MODE_NAMES if name != "plain"}
    assert cured == {"control", "paper-no-key-bias"} | told


@pytest.mark.parametrize(
    "name", ["", "baseline", "rescued-", "exact_delta+paper_softmax-", "rescued-paper-exact-delta", "exact-delta+"]
)
def test_a_name_that_is_none_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"variant .* does not exist; allowed are untreated, rescued, control"):
        find_variant(name)
