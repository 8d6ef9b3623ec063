"""A recipe through transformers' own model and Trainer gives a trace as the laboratory's loop does."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreshock.contract.slots import Slot
from foreshock.lab.recording.trace import read_trace
from foreshock.lab.scoring.score import score_all
from foreshock.lab.training.arm import CONTROL, UNTREATED, find_arm
from foreshock.lab.training.corpus import standard_library
from foreshock.lab.training.recipes import Recipe, find_recipe
from foreshock.lab.training.transformers_run import transformers_run


def tiny() -> Recipe:
    recipe = find_recipe("gpt2-small")
    shape = replace(recipe.model, layers=2, heads=4, width=32, context=16, vocabulary=256)
    return replace(recipe, model=shape, batch=4, steps=20, warmup_steps=5, sample_every_steps=1)


def test_both_arms_are_recorded_step_by_step_and_head_by_head(tmp_path: Path) -> None:
    corpus, paths = standard_library(), []
    for arm in (UNTREATED, CONTROL):
        paths.append(tmp_path / f"{arm.name}.jsonl.gz")
        transformers_run(tiny(), arm, seed=1, trace=paths[-1], corpus=corpus)
    untreated, control = map(read_trace, paths)
    assert untreated.header["loop"] == "transformers"
    assert (untreated.rounds, control.rounds) == (True, False)
    assert (untreated.header["split"], control.header["truth"]) == ("tuning", "healthy")
    for trace in (untreated, control):
        assert trace.steps.step.tolist() == list(range(1, 21))
        assert np.isfinite(trace.steps.grad_norm).all()
        assert trace.steps.loss[-5:].mean() < trace.steps.loss[:5].mean()
        assert trace.heads == [(layer, head) for layer in (0, 1) for head in range(4)]
        counted = [words for sample in trace.samples if (words := sample.words()) is not None]
        assert sum(words[:, Slot.ROWS] for words in counted).tolist() == [20 * 4 * 16] * 8  # type: ignore[union-attr]
        rates = [sample.learning_rate or 0.0 for sample in trace.samples]
        assert max(rates) == pytest.approx(6e-4, rel=1e-3)  # at the end of the warm-up
        assert 5e-5 < rates[-1] < 1.2e-4
    assert untreated.steps.loss[0] == pytest.approx(control.steps.loss[0], rel=0.02)  # equal weights, equal batches
    assert score_all(paths)[0].split == "tuning"


def test_what_is_no_gpt2_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="llama-small is no GPT-2 with AdamW"):
        transformers_run(find_recipe("llama-small"), UNTREATED, seed=1, trace=tmp_path / "t.gz")
    with pytest.raises(ValueError, match="arm exact-delta is not run through transformers"):
        transformers_run(find_recipe("gpt2-small"), find_arm("exact-delta"), seed=1, trace=tmp_path / "t.gz")
    assert list(tmp_path.iterdir()) == []
