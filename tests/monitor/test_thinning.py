"""The agent's half of the cadence: all rows are counted near a warning, few while a layer is quiet."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.monitor.doubles import Listener, ScriptedDetectors, verdict
from tests.monitor.executions import EVERY_STEP
from tests.monitor.tiny_models import batch, next_token_loss, tiny_gpt
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import Floats, Slot, identity_row
from foreshock.monitor import Agent, attach
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE
from foreshock.monitor.detect.detectors import DetectorConfig
from foreshock.monitor.detect.signals import SIGNALS, HeadSignal
from foreshock.monitor.instruments import near_a_warning
from foreshock.monitor.sampling import thinning
from foreshock.monitor.sampling.thinning import LEAST_ROWS, Thinning, new_cadence

HOLD = 300
NOWHERE = np.zeros(5, dtype=np.bool_)
PLAIN = np.zeros(5, dtype=np.int32)
FEW: dict[str, Any] = {"count_every_blocks": 3, "detectors": DetectorConfig(settle_steps=0, block_steps=1)}


def rows(*of_layers: int) -> Any:
    """Counts of five heads in two layers, of two and of three heads."""
    words = np.tile(identity_row(), (5, 1))
    words[:, Slot.ROWS] = np.repeat(of_layers, (2, 3))
    return words


def two_layers(every: int = 16, young: int = 0) -> tuple[Thinning, Tensor]:
    cadence = new_cadence(2, torch.device("cpu"))
    return Thinning(cadence, [2, 3], every_blocks=every, hold_steps=HOLD, young_steps=young), cadence


MANY = rows(10**6, 10**6)


def test_a_layer_that_is_near_a_warning_counts_all_rows_and_its_neighbour_does_not() -> None:
    thinned, cadence = two_layers()
    assert cadence.tolist() == [[1, 0], [1, 0]]
    thinned.follow(MANY, NOWHERE, PLAIN, 10)
    assert cadence.tolist() == [[16, 0], [16, 0]]
    near = NOWHERE.copy()
    near[3] = True
    thinned.follow(MANY, near, PLAIN, 20)
    assert cadence.tolist() == [[16, 0], [1, 0]]


def test_it_goes_back_only_when_it_was_quiet_for_a_while() -> None:
    thinned, _ = two_layers()
    near = NOWHERE.copy()
    near[0] = True
    thinned.follow(MANY, near, PLAIN, 100)
    thinned.follow(MANY, NOWHERE, PLAIN, 100 + HOLD - 1)
    assert thinned.every.tolist() == [1, 16]
    thinned.follow(MANY, NOWHERE, PLAIN, 100 + HOLD)
    assert thinned.every.tolist() == [16, 16]


def test_a_switched_head_a_fresh_warning_a_young_run_and_silent_detectors_ask_for_all_rows() -> None:
    modes = PLAIN.copy()
    modes[4] = 1
    for asked, expected in (
        ({"modes": modes}, [16, 1]),
        ({"watch_until": 5001}, [1, 1]),
        ({"near": None}, [1, 1]),
        ({"step": 999}, [1, 1]),
        ({}, [16, 16]),
    ):
        thinned, _ = two_layers(young=1000)
        given_: dict[str, Any] = {"words": MANY, "near": NOWHERE, "modes": PLAIN, "step": 5000} | asked
        thinned.follow(**given_)
        assert thinned.every.tolist() == expected, asked


def test_a_run_that_is_set_back_is_not_counted_whole_for_all_that_it_was_ahead() -> None:
    thinned, _ = two_layers()
    thinned.follow(MANY, None, PLAIN, 90_000)
    thinned.follow(MANY, NOWHERE, PLAIN, 1000)
    thinned.follow(MANY, NOWHERE, PLAIN, 1000 + HOLD)
    assert thinned.every.tolist() == [16, 16]


@given(st.lists(st.integers(0, 10**7), min_size=2, max_size=2), st.integers(2, 64))
def test_a_sample_looks_at_the_least_rows_or_at_all_of_them(counts: list[int], every: int) -> None:
    thinned, cadence = two_layers(every)
    thinned.follow(rows(*counts), NOWHERE, PLAIN, 0)
    for count, k in zip(counts, cadence[:, 0].tolist(), strict=True):
        assert 1 <= k <= every
        assert k == 1 or count // k >= LEAST_ROWS
        assert k == every or count // (k + 1) < LEAST_ROWS


def test_k_is_written_in_place_and_the_tick_goes_on() -> None:
    thinned, cadence = two_layers()
    cadence[:, 1] = torch.tensor([5, 7])
    place = cadence.data_ptr()
    thinned.follow(MANY, NOWHERE, PLAIN, 10)
    assert cadence.tolist() == [[16, 5], [16, 7]]
    assert cadence.data_ptr() == place


def test_a_drift_of_the_offset_is_near_before_any_other_signal_is() -> None:
    pressure = np.zeros((len(SIGNALS), 3))
    pressure[HeadSignal.OFFSET] = 0.1, 0.3, 0.0
    pressure[HeadSignal.SCORE] = 0.3, 0.0, 0.7
    assert near_a_warning(pressure.max(axis=0), pressure).tolist() == [False, True, True]


# ---- with a model -------------------------------------------------------------------------------------------------


class Told(ScriptedDetectors):
    """Says the risk that it is told to say."""

    def __init__(self) -> None:
        super().__init__(4)
        self.says = np.zeros(4)

    @property
    def risk(self) -> Floats:
        return self.says.copy()


def step_of(model: nn.Module, agent: Agent, ids: Tensor) -> None:
    torch.autograd.backward(next_token_loss(model(ids), ids))
    agent.step()


def cadences(agent: Agent) -> list[list[int]]:
    layers = [vars(module)[LAYER_ATTRIBUTE] for module in agent._instruments.watched]
    return [layer.cadence.tolist() for layer in layers]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_watched_model_is_counted_sparsely_wholly_near_a_warning_and_sparsely_again(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thinning, "LEAST_ROWS", 1)
    model, listener, detectors = tiny_gpt(), Listener(), Told()
    ids = batch(0, rows=6)  # six sequences, each a block of its own, of which a head looks at two under k = 3
    with attach(model, **EVERY_STEP, **FEW) as agent:
        agent.subscribe(listener)
        agent.detectors = detectors
        run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for step in range(20):
            detectors.says[3] = step == 6  # a head of the second layer
            step_of(run, agent, ids)
        assert cadences(agent) == [[3, 20], [3, 20]]
    if compiled:
        torch._dynamo.reset()
    words = np.stack([sample.words() for sample in listener.of(wire.Sample)])
    assert (words[:, :, Slot.ROWS] == 6 * 12).all()
    looked = words[:, :, Slot.ROWS] - words[:, :, Slot.SKIPPED_ROWS]
    assert (looked[0] == 6 * 12).all()  # nobody knows yet
    assert (looked[3:, :2] == 2 * 12).all()  # the first layer is never near a warning
    whole = np.flatnonzero((looked[3:, 2:] == 6 * 12).all(axis=1)) + 3
    assert whole.tolist() == list(range(whole[0], whole[0] + 3))  # for persist_blocks of block_steps
    assert 7 <= whole[0] <= 9
    assert ((looked[3:, 2:] == 2 * 12).all(axis=1) | (looked[3:, 2:] == 6 * 12).all(axis=1)).all()


def test_shares_over_k_steps_are_those_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinning, "LEAST_ROWS", 1)
    ids, shares = batch(1, rows=6), []
    for every in (1, 3):
        model, listener = tiny_gpt(seed=3), Listener()
        with attach(model, **{**EVERY_STEP, **FEW, "count_every_blocks": every}) as agent:
            agent.subscribe(listener)
            agent.detectors = Told()
            for _ in range(15):
                step_of(model, agent, ids)
        last = np.stack([sample.words() for sample in listener.of(wire.Sample)])[-3:]
        tied, rows_, skipped = (last[:, :, slot].sum(0) for slot in (Slot.TIED_ROWS_ONE, Slot.ROWS, Slot.SKIPPED_ROWS))
        assert (skipped * 3 == rows_ * (3 - 1)).all() if every == 3 else not skipped.any()
        shares.append(tied / (rows_ - skipped))
    np.testing.assert_allclose(shares[0], shares[1], rtol=1e-12)
    assert shares[0].max() > 0


def test_a_warning_anywhere_lets_every_layer_count_all_rows_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinning, "LEAST_ROWS", 1)
    model, ids = tiny_gpt(), batch(2, rows=6)
    with attach(model, **EVERY_STEP, **FEW, close_watch_steps=4) as agent:
        agent.detectors = ScriptedDetectors(4, {5: [verdict(None, None, cause="other", signal="nonfinite")]})
        seen = []
        for _ in range(20):
            step_of(model, agent, ids)
            seen.append([k for k, _ in cadences(agent)])
    assert seen[3] == [3, 3]
    assert seen[7] == [1, 1]
    assert seen[-1] == [3, 3]


def test_copies_and_pickles_of_a_watched_model_move_no_tick() -> None:
    model, ids = tiny_gpt(), batch(3)
    with attach(model, **EVERY_STEP, **FEW) as agent:
        step_of(model, agent, ids)
        before = cadences(agent)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not any(LAYER_ATTRIBUTE in vars(module) for module in other.modules())
            torch.autograd.backward(next_token_loss(other(ids), ids))
        assert cadences(agent) == before == [[1, 1], [1, 1]]


def test_one_in_one_is_no_cadence_at_all_and_a_wrong_number_is_refused_with_a_sentence() -> None:
    model = tiny_gpt()
    with attach(model, **EVERY_STEP, count_every_blocks=1) as agent:
        assert agent._instruments.thinning is None
        assert [vars(module)[LAYER_ATTRIBUTE].cadence for module in agent._instruments.watched] == [None, None]
    for wrong in (0, 65):
        with pytest.raises(ValueError, match=r"count_every_blocks: Input should be (greater|less) than or equal to"):
            attach(tiny_gpt(), **EVERY_STEP, count_every_blocks=wrong)
