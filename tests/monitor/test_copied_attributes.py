"""A module that copies its own `__dict__` takes hooks and layer along: they do nothing there, and do not last."""

import copy
from typing import Any

import pytest
import torch
from tests.monitor.executions import EVERY_STEP
from tests.monitor.test_copies import listening, rows, traces
from tests.monitor.tiny_models import CausalSelfAttention, batch, tiny_gpt, train_step
from torch import nn

from foreshock.monitor import attach


class CopiesItsAttributes(CausalSelfAttention):
    """As code for moving averages does it."""

    deep = True

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied = type(self).__new__(type(self))
        copied.__dict__ = copy.deepcopy(self.__dict__, memo) if self.deep else dict(self.__dict__)
        return copied


class SharesItsAttributes(CopiesItsAttributes):
    deep = False


@pytest.mark.promise("A25")
@pytest.mark.parametrize("kind", [CopiesItsAttributes, SharesItsAttributes])
def test_a_module_that_copies_its_own_dict_leaves_a_copy_that_counts_nothing_and_is_clean_after_close(
    kind: type[CopiesItsAttributes],
) -> None:
    model = tiny_gpt(kind(16, 2))
    agent, listener = listening(model, attention="keep", probe_rows=999)
    second = copy.deepcopy(model)
    for step in range(2):
        second(batch(step)).sum().backward()
        agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), step))
    third = copy.deepcopy(model)
    with attach(third, **EVERY_STEP):  # a copy may be attached while the first is watched
        pass
    agent.close()
    assert rows(listener) == [[24, 24]] * 2
    assert [traces(each) for each in (model, second, third)] == [[], [], []]
    attach(second, **EVERY_STEP).close()


@pytest.mark.promise("A25")
def test_cleaning_the_copies_of_one_agent_leaves_the_modules_of_another_watched() -> None:
    one, other = tiny_gpt(CopiesItsAttributes(16, 2)), tiny_gpt(CopiesItsAttributes(16, 2))
    first, (agent, listener) = attach(one, **EVERY_STEP), listening(other)
    first.close()
    agent.step(train_step(other, torch.optim.SGD(other.parameters(), lr=0.1), 0))
    agent.close()
    assert rows(listener) == [[24, 24]]
