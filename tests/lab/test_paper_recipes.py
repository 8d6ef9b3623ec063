"""The recipes of the paper's own run have its settings, and train."""

import math
from dataclasses import replace

import pytest
import torch
from tests.lab.tiny_recipes import tiny

from foreshock.lab.texts.folder_text import VOCABULARY
from foreshock.lab.training.arm import CONTROL, find_arm
from foreshock.lab.training.model import GPT
from foreshock.lab.training.paper_recipes import PAPER_RECIPES
from foreshock.lab.training.ranks import Ranks
from foreshock.lab.training.recipes import Recipe, find_recipe
from foreshock.lab.training.run import Training


@pytest.mark.parametrize("recipe", PAPER_RECIPES, ids=lambda recipe: recipe.name)
def test_every_recipe_of_the_paper_trains_at_a_small_size(recipe: Recipe) -> None:
    training = Training(replace(tiny(recipe), micro_batch=2), find_arm("flash-untreated"), 5)
    with training.agent:
        course = [float(training.advance()) for _ in range(12)]
    assert all(map(math.isfinite, course))
    assert min(course[6:]) < course[0]


def test_the_settings_are_those_of_the_paper_and_of_its_authors_program() -> None:
    paper = find_recipe("paper-gpt2")
    assert paper.batch * paper.model.context == 524_288
    assert (paper.learning_rate, paper.warmup_steps, paper.betas, paper.clip) == (1e-3, 2000, (0.9, 0.95), 1.0)
    assert (paper.weight_decay, paper.model.qkv_bias, paper.compiled) == (0.0, False, True)
    rates = [paper.learning_rate * paper.rate_share(step) for step in (1, 1000, 2000, 301_000, 600_000, 700_000)]
    assert rates == pytest.approx([5e-7, 5e-4, 1e-3, 5.05e-4, 1e-5, 1e-5])
    assert paper.model.vocabulary >= VOCABULARY
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in GPT(paper.model).parameters())
    assert weights == 50_304 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 2 * 768) + 768


def test_twins_differ_in_what_their_names_say() -> None:
    paper = find_recipe("paper-gpt2")
    for size, batch in (("", 512), ("-64k", 64)):
        bare, biased = find_recipe(f"paper-gpt2{size}"), find_recipe(f"paper-gpt2{size}-bias")
        assert (bare.batch, biased.batch) == (batch, batch)
        assert replace(bare, name="", summary="", batch=0) == replace(paper, name="", summary="", batch=0)
        assert biased.model == replace(bare.model, qkv_bias=True)
        decayed = find_recipe(f"paper-gpt2{size}-decay")
        assert (decayed.weight_decay, decayed.bias_decay) == (0.1, 0.0)
    assert len({recipe.name for recipe in PAPER_RECIPES}) == 8
    assert paper.under(CONTROL).model == replace(paper.model, attention_dtype="float32")


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_any_usual_number_of_gpus_shares_a_batch_out_in_parts_of_at_most_32(world: int) -> None:
    for recipe in PAPER_RECIPES:
        rows, at_once = Ranks(0, world).rows(recipe.batch, recipe.micro_batch)
        assert (rows.stop - rows.start) * world == recipe.batch
        assert at_once == min(32, recipe.batch // world)
