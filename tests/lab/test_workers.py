"""Arms in worker processes: what fails in one is reported, with its reason."""

from dataclasses import replace
from pathlib import Path

import pytest

from foreshock.lab.training.arm import UNTREATED
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.workers import ArmOrder, Workers, in_seconds

TINY = replace(
    find_recipe("key-bias-small"),
    model=ModelConfig(layers=2, heads=2, width=16, context=16),
    steps=200,
    warmup_steps=10,
)


@pytest.mark.full
def test_a_worker_that_fails_is_reported_with_its_reason(tmp_path: Path) -> None:
    workers = Workers()
    order = ArmOrder(
        recipe=TINY,
        arm=UNTREATED,
        seed=1,
        run="r",
        steps=1,
        url=None,
        branch_from=tmp_path / "missing.pt",
        deadline=in_seconds(60),
        agent_settings={},
    )
    try:
        workers.start(order)
        with pytest.raises(RuntimeError, match=r"the variant baseline failed[\s\S]*missing.pt"):
            list(workers.messages())
    finally:
        workers.stop()
