"""Scores are measured as the attention sees them: under masks of any form, biases, and functions of the scores."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.monitor.doubles import Listener
from tests.monitor.probing import EVERY_ROW, probed, tensors
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import MAX_SLOTS, Slot, Words, slot_values
from foreshock.monitor import attach
from foreshock.monitor.attention.probe import Sampling
from foreshock.monitor.attention.probed_rows import UnmeasurableError
from foreshock.monitor.detect.detectors import Detectors
from foreshock.monitor.detect.levels import KERNEL
from foreshock.monitor.detect.readings import Readings, head_readings

FORMS: dict[str, Any] = {
    "bool": None,
    "-inf": -math.inf,
    "finfo.min": None,
    "-1e9": -1e9,
    "-65504": -65504.0,
    "-1e4": -1e4,
}
promise = pytest.mark.promise("A20")


def written(seen: Tensor, form: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The mask of what is seen as people write it."""
    if form == "bool":
        return seen
    low = torch.finfo(dtype).min if form == "finfo.min" else FORMS[form]
    return torch.zeros(seen.shape).masked_fill(~seen, low).to(dtype)


def twice(causal: Tensor, real: Tensor, form: str) -> Tensor:
    """Causality and padding as two masks, added."""
    if form == "bool":
        return causal & real
    return written(causal, form) + written(real, form)


def padded(length: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Causality [S, S], and which keys are real [B, 1, 1, S]: padding on the left, on the right or in between."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    real = torch.rand(batch, 1, 1, length, generator=generator) < 0.6
    real[0, ..., :3] = False
    real[-1, ..., -3:] = False
    return causal, real


def truth(query: Tensor, key: Tensor, seen: Tensor) -> dict[Slot, Tensor]:
    """What there is to count of each head where `seen` [B, 1, Sq, Sk] says which keys a row sees, in float64."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = (query.double() @ key.double().mT / 4).masked_fill(~seen, -math.inf)
    visible = seen.sum(-1).expand(scores.shape[:3])
    some = visible > 0
    offset = torch.where(some, scores.logsumexp(-1) - visible.double().log(), 0.0)
    row_max = scores.amax(-1)
    tied = (scores.bfloat16() == row_max.bfloat16().unsqueeze(-1)).sum(-1) > 1
    return {
        Slot.ROWS: some.sum((0, 2)),
        Slot.EMPTY_ROWS: (~some).sum((0, 2)),
        Slot.TIED_ROWS_BF16: (tied & some).sum((0, 2)),
        Slot.SCORE_MAX: row_max.amax((0, 2)),
        Slot.ROW_MAX_ABS: row_max.abs().masked_fill(~some, -math.inf).amax((0, 2)),
        Slot.SCORE_OFFSET_SUM: offset.sum((0, 2)),
        Slot.SCORE_OFFSET_SUMSQ: offset.square().sum((0, 2)),
    }


def assert_counts(words: Words, expected: dict[Slot, Tensor], tolerance: float) -> None:
    for slot, value in expected.items():
        np.testing.assert_allclose(slot_values(words, slot), value, rtol=tolerance, atol=tolerance, err_msg=slot.name)


@promise
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("added_twice", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_in_any_form_hides_what_a_bool_hides(form: str, added_twice: bool, seed: int) -> None:
    query, key, value, grad = tensors(torch.float32, seed=seed)
    causal, real = padded(24, 3, torch.Generator().manual_seed(seed))
    mask = twice(causal, real, form) if added_twice else written(causal & real, form)
    out = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    words = probed(query, key, value, grad, out, Sampling(EVERY_ROW), mask=mask, numerics="float32")
    expected = truth(query, key, causal & real)
    assert expected[Slot.EMPTY_ROWS].min() >= 3  # padding on the left leaves rows that see nothing
    assert_counts(words, expected, 2e-6)


@promise
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_in_16_bits_hides_what_a_bool_hides(form: str, dtype: torch.dtype) -> None:
    query, key, value, grad = tensors(dtype)
    causal, real = padded(24, 3, torch.Generator().manual_seed(1))
    mask = written(causal & real, form, dtype)  # -1e9 is -inf in fp16
    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), mask=mask)
    assert_counts(words, truth(query, key, causal & real), 2e-6)


@promise
@pytest.mark.parametrize("form", FORMS)
def test_rows_that_see_nothing_leave_the_delta_bias_alone(form: str) -> None:
    query, key, value, grad = tensors(torch.bfloat16, kv_heads=4)
    seen = torch.ones(3, 1, 24, 24, dtype=torch.bool).tril()
    seen[1] = False  # one entry of the batch is padding throughout
    mask = written(seen, form)
    out = F.scaled_dot_product_attention(query, key, value, seen).nan_to_num()
    words = probed(query, key, value, grad, out, Sampling(EVERY_ROW), mask=mask)
    query, key, value, grad, out, seen = (x[[0, 2]] for x in (query, key, value, grad, out, seen))
    alone = probed(query, key, value, grad, out, Sampling(EVERY_ROW), mask=seen)
    assert slot_values(words, Slot.EMPTY_ROWS).tolist() == [24] * 4
    for slot in (Slot.DELTA_BIAS_SUM, Slot.DELTA_BIAS_ABS, Slot.DELTA_BIAS_SUMSQ, *MAX_SLOTS):
        np.testing.assert_allclose(slot_values(words, slot), slot_values(alone, slot), rtol=1e-6, err_msg=slot.name)


def alibi(slope: float, length: int = 24) -> Tensor:
    """Distances times a slope, [S, S], of which the future is hidden."""
    distance = torch.arange(length).view(-1, 1) - torch.arange(length)
    return (-slope * distance).masked_fill(distance < 0, -math.inf).double()


def offset_under(bias: Tensor) -> float:
    """Mean offset of the first head, in float64."""
    query, key, value, grad = tensors(torch.float64, kv_heads=4)
    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), mask=bias, numerics="float64")
    offset = slot_values(words, Slot.SCORE_OFFSET_SUM) / slot_values(words, Slot.ROWS)
    assert slot_values(words, Slot.EMPTY_ROWS).tolist() == [0] * 4
    return float(offset[0])


@pytest.mark.full
@promise
def test_the_far_keys_of_an_alibi_are_seen_and_the_offset_never_jumps() -> None:
    query, key, _, _ = tensors(torch.float64, kv_heads=4)
    gentle = alibi(2.0)  # up to -46: far, and no mask
    scores = (query @ key.mT / 4)[:, 0] + gentle
    expected = (scores.logsumexp(-1) - torch.arange(1, 25).double().log()).mean()
    assert offset_under(gentle) == pytest.approx(float(expected), rel=1e-12)
    slopes = np.arange(70.0, 110.0, 0.02)  # where the neighbour goes out of sight in every row
    offsets = np.array([offset_under(alibi(float(slope))) for slope in slopes])
    assert np.ptp(offsets) > 0.5
    assert np.abs(np.diff(offsets)).max() < 2 * 0.02


@promise
def test_a_bias_that_all_keys_of_a_row_share_says_nothing_of_a_head() -> None:
    query, key, value, grad = tensors(torch.float32, kv_heads=4)
    steep, rows = alibi(0.5), torch.arange(24.0).double().view(-1, 1)
    counted = []
    for shared in (0.0, 400.0, -300.0, 50 * rows, -40 * rows.flip(0)):
        mask = (steep + shared).float()
        out = F.scaled_dot_product_attention(query, key, value, mask)
        counted.append(probed(query, key, value, grad, out, Sampling(EVERY_ROW), mask=mask, numerics="float32"))
        assert not counted[-1][:, Slot.WRONG_ROWS].any()
        for slot in (Slot.ROWS, Slot.ROW_MAX_ABS, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ, Slot.ENTROPY_SUM):
            first, last = slot_values(counted[0], slot), slot_values(counted[-1], slot)
            np.testing.assert_allclose(last, first, rtol=2e-4, err_msg=slot.name)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bias_that_is_not_finite_makes_rows_that_are_not_finite(bad: float) -> None:
    query, key, value, grad = tensors(torch.float32, kv_heads=4)
    mask = torch.zeros(24, 24)
    mask[3, 5] = bad
    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), mask=mask, numerics="float32")
    assert slot_values(words, Slot.NONFINITE_ROWS).tolist() == [3] * 4
    assert slot_values(words, Slot.EMPTY_ROWS).tolist() == [0] * 4


@promise
@pytest.mark.parametrize("form", FORMS)
def test_a_head_whose_scores_grow_is_warned_about_under_a_mask_in_any_form(form: str) -> None:
    query, key, value, grad = tensors(torch.float32, kv_heads=4, offset=0.0)
    causal, real = padded(24, 3, torch.Generator().manual_seed(0))
    mask = written(causal & real, form)
    detectors = Detectors([(0, head) for head in range(4)])
    warned: list[wire.Verdict] = []
    for step in range(25, 1501, 25):
        query[:, 0] *= 2 ** (25 / 150)
        words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), mask=mask, numerics="float32")
        seen = Readings(step=step, since_step=step - 25, modes=np.zeros(4, dtype=np.int32), **head_readings(words))
        # the output that the probe was given is none of this attention: its rows are wrong
        warned += [verdict for verdict in detectors.update(seen) if verdict.state == "raised"]
    drifts = [(verdict.layer, verdict.head, verdict.step) for verdict in warned if verdict.signal != KERNEL]
    assert drifts == [(0, 0, 575)]


class Masked(nn.Module):
    """One layer whose mask, of causality and padding on the left, is written with -1e9."""

    num_heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        causal, real = torch.ones(12, 12, dtype=torch.bool).tril(), torch.arange(12) >= torch.tensor([[0], [3]])
        mask = (1.0 - (causal & real[:, None, None]).float()) * -1e9
        query, key, value = (
            project(x).unflatten(-1, (4, 8)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(-2)


@promise
def test_a_model_that_masks_by_hand_counts_its_empty_rows_as_empty() -> None:
    model = Masked()
    taken: list[Any] = []
    agent = attach(model, run="masked", attention="keep", probe_rows=EVERY_ROW, quiet=True, strict=True)
    agent.subscribe(taken.append)
    model(torch.randn(2, 12, 32)).square().mean().backward()
    agent.step()
    agent.close()
    words = next(event for event in taken if event.kind == "sample").words()
    assert slot_values(words, Slot.EMPTY_ROWS).tolist() == [3] * 4
    assert slot_values(words, Slot.ROW_MAX_ABS).max() < 10


SLOPES = torch.tensor([0.5, 0.1, 2.0, 0.02])
CAP = 12.0


def alibi_of_each(scores: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return scores - SLOPES[head] * (query - key).abs()


def capped(scores: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (scores / CAP).tanh() * CAP


def same_words(words: Any, expected: Any, tolerance: float = 0.0) -> None:
    assert slot_values(expected, Slot.ROWS).min() > 0
    for slot in Slot:
        got, wanted = slot_values(words, slot), slot_values(expected, slot)
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance, err_msg=slot.name)


@pytest.mark.parametrize("rows", [5, 40, EVERY_ROW])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_a_function_of_the_scores_counts_as_the_same_bias_in_a_mask(causal: Any, rows: int) -> None:
    query, key, value, grad = tensors(torch.bfloat16, seed=rows)
    position = torch.arange(24, dtype=torch.int32)
    bias = alibi_of_each(torch.zeros(()), position, torch.arange(4).view(-1, 1, 1), position[:, None], position)
    options: dict[str, Any] = {"causal": causal, "window": (9, -1)}
    words = probed(query, key, value, grad, grad, Sampling(rows, strict=True), 3, score_mod=alibi_of_each, **options)
    masked = probed(query, key, value, grad, grad, Sampling(rows, strict=True), 3, mask=bias, **options)
    same_words(words, masked)


@pytest.mark.parametrize("offset", [2.0, 40.0])
def test_a_function_that_bends_the_scores_counts_as_a_softcap_and_hides_nothing(offset: float) -> None:
    arguments = tensors(
        torch.float32, offset=offset
    )  # scores of 6,400 that a cap of 12 lowers by more than a mask does
    options: dict[str, Any] = {"causal": "top_left", "numerics": "float32"}
    words = probed(*arguments, arguments[0], Sampling(EVERY_ROW, strict=True), score_mod=capped, **options)
    same_words(words, probed(*arguments, arguments[0], Sampling(EVERY_ROW), softcap=CAP, **options))
    assert slot_values(words, Slot.ROWS).tolist() == [3 * 24] * 4


@pytest.mark.parametrize("form", FORMS)
def test_a_function_hides_a_key_with_any_number_that_masks_are_written_with(form: str) -> None:
    query, key, value, grad = tensors(torch.float32)
    causal, real = padded(24, 3, torch.Generator().manual_seed(1))
    mask = written(causal & real, "-inf" if form == "bool" else form)

    def masked(scores: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return scores + mask[batch, 0, query, key]

    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), score_mod=masked, numerics="float32")
    assert_counts(words, truth(query, key, causal & real), 2e-6)


def test_what_a_function_returns_is_never_written_into() -> None:
    arguments = tensors(torch.float32)
    held = torch.zeros(())

    def forgets(scores: Tensor, *where: Tensor) -> Tensor:
        return held.expand_as(scores)

    words = probed(*arguments, arguments[0], Sampling(EVERY_ROW, strict=True), score_mod=forgets, numerics="float32")
    assert not held
    np.testing.assert_allclose(slot_values(words, Slot.SCORE_OFFSET_SUM), 0.0, atol=1e-4)
    assert slot_values(words, Slot.SCORE_MAX).tolist() == [0.0] * 4


@pytest.mark.parametrize("strict", [True, False])
def test_a_function_that_cannot_be_computed_again_counts_nothing_and_the_probe_goes_on(strict: bool) -> None:
    def fails(scores: Tensor, *where: Tensor) -> Tensor:
        raise UnmeasurableError

    arguments = tensors(torch.float32)
    sampling = Sampling(EVERY_ROW, strict=strict)
    words = probed(*arguments, arguments[0], sampling, score_mod=fails, numerics="float32")
    assert slot_values(words, Slot.ROWS).tolist() == [0] * 4
    assert sampling.fault is None


def test_nothing_that_a_function_computes_is_recorded_for_a_gradient() -> None:
    query, key, value, grad = tensors(torch.float32)
    learned, recorded = torch.nn.Parameter(torch.zeros(4)), []

    def biased(scores: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        recorded.append((scores + learned[head]).requires_grad)
        return scores + learned[head]

    with torch.enable_grad():
        probed(query, key, value, grad, grad, Sampling(EVERY_ROW, strict=True), score_mod=biased, numerics="float32")
    assert set(recorded) == {False}


LENGTH = 9
NO_DROPOUT: dict[str, Any] = dict.fromkeys(
    ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "conformer_conv_dropout"), 0.0
)
CONFORMER: dict[str, Any] = {
    **NO_DROPOUT,
    "vocab_size": 11,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 16,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.T5Config(
        vocab_size=23, d_model=24, d_kv=8, num_heads=3, num_layers=2, num_decoder_layers=1, d_ff=16, dropout_rate=0.0
    )
    words = torch.arange(LENGTH).view(1, -1) * 2 + 3
    return transformers.T5Model(config), {"input_ids": words, "decoder_input_ids": words[:, :5] + 1}


def conformer_of_distances() -> tuple[nn.Module, dict[str, Tensor]]:
    """The score of a distance is a product with the query."""
    config = transformers.Wav2Vec2BertConfig(
        **CONFORMER,
        position_embeddings_type="relative_key",
        feature_projection_input_dim=10,
        left_max_position_embeddings=3,
        right_max_position_embeddings=2,
    )
    return transformers.Wav2Vec2BertModel(config), {"input_features": torch.randn(1, LENGTH, 10)}


def true_scores(model: Any, given: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the eager attention of each layer takes the softmax of, [H, Sq, Sk], in the order of the layers."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    scores, softmax = [], nn.functional.softmax

    def recording(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        scores.append(x[0].detach().double())
        return softmax(x, *args, **kwargs)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(nn.functional, "softmax", recording)
        model(**given)
    return scores


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("build", [t5, conformer_of_distances])
def test_a_position_bias_is_part_of_the_scores_that_are_measured(
    build: Any, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(41)
    model, given = build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    scores = true_scores(model, given, monkeypatch)
    model.set_attn_implementation(implementation)
    listener = Listener()
    every_row: dict[str, Any] = {"attention": "keep", "probe_rows": 10**6, "strict": True}
    with attach(model, url=None, quiet=True, **every_row) as agent:
        agent.subscribe(listener)
        torch.autograd.backward(model(**given).last_hidden_state.square().mean())
        agent.step(1.0)
        names = [layer.name for layer in agent._attached.layers]
    assert len(scores) == len(names) > 1
    words = listener.of(wire.Sample)[0].words().reshape(len(names), 3, -1)
    for name, measured, true in zip(names, words, scores, strict=True):
        seen = true > torch.finfo(torch.float32).min / 2  # the decoder's causal mask hides the others
        offset = true.masked_fill(~seen, -math.inf).logsumexp(-1) - seen.sum(-1).log()
        np.testing.assert_allclose(
            slot_values(measured, Slot.SCORE_OFFSET_SUM), offset.sum(1), rtol=1e-4, atol=1e-5, err_msg=name
        )
    assert "native attention, sampled" in agent.report()
