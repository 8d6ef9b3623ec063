"""What recipes may say of a run: shapes of the model, optimizers, text, and harm that is done on purpose."""

import re
from dataclasses import replace
from typing import Any

import pytest
import typer.main

from foreshock.cli.main import app
from foreshock.contract import wire
from foreshock.contract.modes import MODE_NAMES, mode_name, served_modes
from foreshock.contract.slots import Slot
from foreshock.lab.sets.published_runs import published
from foreshock.lab.texts.corpus import Corpus, standard_library
from foreshock.lab.training.arm import ARMS, CONTROL, UNTREATED, Arm, find_arm
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipes import Recipe, find_recipe
from foreshock.lab.training.run import Training

SHAPE = ModelConfig(layers=2, heads=4, width=32, context=16)
TINY = replace(find_recipe("key-bias-small"), model=SHAPE, batch=4, sample_every_steps=5)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return standard_library()


def losses(recipe: Recipe, corpus: Corpus, steps: int, arm: Arm = UNTREATED) -> list[float]:
    training = Training(recipe, arm, 1, corpus=corpus)
    with training.agent:
        return [float(training.advance()) for _ in range(steps)]


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_heads": 2, "rotary": True, "qkv_bias": False},
        {"qk_norm": True},
        {"kv_heads": 1, "qk_norm": True, "rotary": True, "matmul_dtype": "bfloat16"},
        {"value_offset": 2.0, "qkv_bias": False},
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


def test_biases_may_learn_at_a_multiple_of_the_rate_of_all_else(corpus: Corpus) -> None:
    recipe = replace(TINY, learning_rate=1e-3, bias_rate=8.0, warmup_steps=2)
    training = Training(recipe, UNTREATED, 0, corpus=corpus)
    with training.agent:
        for _ in range(2):
            training.advance()
    others, biases = training.optimizer.param_groups
    assert (others["lr"], biases["lr"]) == (1e-3, 8e-3)
    names = {id(p): name for name, p in training.model.named_parameters()}
    assert all(names[id(p)].endswith("c_attn.bias") for p in biases["params"])
    assert len(biases["params"]) == recipe.model.layers
    assert len(others["params"]) + len(biases["params"]) == len(names)


def test_biases_have_a_rate_or_a_decay_of_their_own_but_not_both(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="gives both bias_rate and bias_decay"):
        Training(replace(TINY, bias_rate=8.0, bias_decay=0.1), UNTREATED, 0, corpus=corpus)


def test_a_trace_says_what_its_run_was_made_to_show() -> None:
    key_bias, healthy = find_recipe("key-bias-small"), find_recipe("text-small")
    assert key_bias.truth_of(UNTREATED) == "rounding"
    assert key_bias.truth_of(CONTROL) == key_bias.truth_of(ARMS["exact-delta"]) == "healthy"
    header = healthy.header(UNTREATED, 2, "run")
    assert (header["truth"], header["nature"], header["seed"]) == ("healthy", "natural", 2)
    assert key_bias.header(UNTREATED, 2, "run")["nature"] == "natural"


@pytest.mark.parametrize(
    ("name", "numerics", "mode", "policy", "mitigation", "scope"),
    [
        ("stable-softmax+exact-delta", "kernel", "stable_softmax+exact_delta", "observe", None, "model"),
        ("paper-exact-delta", "paper", "exact_delta", "observe", None, "model"),
        ("paper-softmax", "kernel", "paper_softmax", "observe", None, "model"),
        ("paper-paper-softmax", "paper", "paper_softmax", "observe", None, "model"),
        ("rescued-stable-softmax", "kernel", "plain", "auto", "stable_softmax", "head"),
        ("paper-rescued-all-centred-keys", "paper", "plain", "auto", "centred_keys", "model"),
    ],
)
def test_an_arm_is_made_of_the_name_of_any_mode(
    name: str, numerics: str, mode: str, policy: str, mitigation: str | None, scope: str
) -> None:
    arm = find_arm(name)
    assert (arm.name, arm.numerics, arm.mode, arm.policy) == (name, numerics, mode, policy)
    assert arm.mitigation == (mitigation or find_arm("rescued").mitigation)
    assert arm.switch_scope == scope


@pytest.mark.parametrize("name", ["rescued-", "rescued-nothing", "paper-", "exact-delta+", "plain+plain"])
def test_a_name_that_is_no_mode_is_no_arm(name: str) -> None:
    with pytest.raises(ValueError, match="does not exist; allowed are untreated"):
        find_arm(name)


def test_vectors_may_have_a_decay_of_their_own(corpus: Corpus) -> None:
    decayed = Training(replace(TINY, bias_decay=0.1), UNTREATED, 4, corpus=corpus)
    with decayed.agent:
        decayed.advance()
    groups = decayed.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.0, 0.1]
    assert {p.dim() for p in groups[0]["params"]} == {2}
    assert {p.dim() for p in groups[1]["params"]} == {1}
    assert sum(len(group["params"]) for group in groups) == len(list(decayed.model.parameters()))


def test_an_arm_applied_twice_is_an_arm_applied_once() -> None:
    for name in ("control", "exact-delta"):
        once = TINY.under(find_arm(name))
        assert once.under(find_arm(name)) == once


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


def test_the_help_of_run_set_names_every_set() -> None:
    """Written out there, since a help text shall not wait for PyTorch."""
    said = str(typer.main.get_command(app).commands["lab"].commands["run-set"].params[0].help)  # type: ignore[attr-defined]
    assert set(re.findall(r"[a-z]+(?:-[a-z]+)*", said.partition(":")[2])) - {"or"} == set(published())


@pytest.mark.parametrize("mode", [*MODE_NAMES, mode_name(served_modes()[-1])])  # the last one is the largest union
def test_every_mode_trains_as_an_arm_of_its_name(mode: str, corpus: Corpus) -> None:
    arm = find_arm(mode.replace("_", "-"))
    training = Training(TINY, arm, 1, corpus=corpus)
    with training.agent:
        treated = [float(training.advance()) for _ in range(4)]
        assert set(training.agent.modes().values()) == {mode}
    assert treated == pytest.approx(losses(TINY, corpus, 4), rel=1e-3)
