"""What a diagnosis says of runs and tensors whose truth is known."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from foreshock.cli.main import app
from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention import flash_attention
from foreshock.kernels.flash_attention.statistics import new_state
from foreshock.lab.diagnosis.anatomy import Examined, examine, head_anatomy
from foreshock.lab.diagnosis.examination import diagnose, examine_patient, lab_patient, own_patient, try_removal
from foreshock.lab.diagnosis.wording import Trial, explain
from foreshock.lab.recording.history import History, live, recorded
from foreshock.lab.training.arm import CONTROL, UNTREATED
from foreshock.lab.training.capture import AttentionCall, Capture
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import lab_run
from foreshock.monitor import attach
from foreshock.monitor.config import Numerics
from foreshock.server.testing import FakeRank, LiveService

TRACES = Path(__file__).parents[2] / "lab" / "traces"
TINY = replace(find_recipe("key-bias-small"), model=ModelConfig(layers=2, heads=2, width=16, context=16), batch=4)


class Attention(nn.Module):
    """One layer whose queries may be turned after W_Q; everything that enters attention is bf16."""

    def __init__(self, turn: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 8
        self.qkv = nn.Linear(16, 48)
        self.turn = turn

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.qkv(x).bfloat16().view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(self.turn(query), key, value, is_causal=True)
        return out.transpose(1, 2).flatten(2).float()


class Model(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.attention = attention

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.attention(self.embedding(tokens))
        return hidden


def called(attention: nn.Module, numerics: Numerics = "kernel") -> tuple[AttentionCall, Model]:
    """One call of attention after a backward whose dO is far from small, and the model with its gradients."""
    torch.manual_seed(0)
    model = Model(attention)
    tokens = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(1))
    with (
        attach(model, attention="kernels", quiet=True, url=None, spool_directory=None, numerics=numerics),
        Capture(model) as capture,
    ):
        (model(tokens).square().sum() * 10).backward(retain_graph=True)
    [call] = capture.calls
    return call, model


def test_the_gradient_of_the_query_weight_is_taken_apart_as_training_made_it() -> None:
    call, model = called(Attention())
    examined = examine(call, "here")
    assert examined.weight_error is not None
    assert examined.weight_norm is not None
    x = model.embedding(torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(1))).detach().double()
    grad = model.get_parameter("attention.qkv.weight").grad
    assert grad is not None
    trained = grad[:16].view(2, 8, 16).double()
    query, key, value = (t.detach().double().requires_grad_() for t in (call.query, call.key, call.value))
    assert call.grad_out is not None
    flash_attention(query, key, value, causal="top_left", numerics="float64").backward(call.grad_out.double())  # type: ignore[no-untyped-call]
    assert query.grad is not None
    true = torch.einsum("bhsd,bse->hde", query.grad, x)
    torch.testing.assert_close(examined.weight_norm, true.flatten(1).norm(dim=1), rtol=1e-10, atol=0)
    torch.testing.assert_close(true + examined.weight_error[0], trained, rtol=1e-4, atol=1e-5)


def test_equation_2_gives_the_difference_that_exact_delta_makes() -> None:
    attention = Attention()
    nn.init.constant_(attention.qkv.bias[32:], 32.0)  # a large O loses much to its rounding: delta's error leads
    call, _ = called(attention)
    anatomy = head_anatomy(0, 1, [examine(call, "here")])
    assert anatomy.equation_2 is not None
    cosine, length = anatomy.equation_2
    assert cosine > 0.99  # dS and dQ are rounded to bf16 besides
    assert length == pytest.approx(1.0, abs=0.05)
    assert anatomy.weight_error_plain is not None
    assert anatomy.weight_error_exact is not None
    assert anatomy.weight_error_plain > anatomy.weight_error_exact > 0


def test_the_error_of_delta_is_what_the_agent_counts() -> None:
    call, _ = called(Attention())
    state = new_state(2)
    query, key, value = (x.detach().requires_grad_() for x in (call.query, call.key, call.value))
    out = flash_attention(query, key, value, causal="top_left", numerics="kernel", state=state)
    out.backward(call.grad_out)  # type: ignore[no-untyped-call]
    examined = examine(call, "here")
    counted = state.view(torch.float64)[:, Slot.DELTA_BIAS_SUM], state.view(torch.float64)[:, Slot.DELTA_BIAS_ABS]
    torch.testing.assert_close(examined.delta_error.sum((0, 2)), counted[0], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(examined.delta_error.abs().sum((0, 2)), counted[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(examined.by_feature.sum(1), counted[0], rtol=1e-5, atol=1e-9)
    offset = state.view(torch.float64)[:, Slot.SCORE_OFFSET_SUM] / state[:, Slot.ROWS]
    torch.testing.assert_close(examined.offset, offset, rtol=1e-5, atol=1e-9)
    assert int(state[:, Slot.TIED_ROWS_ONE].sum()) == int(examined.tied.sum())


def test_queries_that_are_turned_after_their_weight_are_not_taken_apart() -> None:
    def rotated(x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2])[:, None] / 10.0 ** torch.arange(4)
        even, odd = x[..., ::2], x[..., 1::2]
        turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
        return torch.stack(turned, -1).flatten(-2).to(x.dtype)

    call, _ = called(Attention(rotated))
    examined = examine(call, "here")
    assert examined.weight_error is None
    anatomy = head_anatomy(0, 0, [examined, examined])
    assert anatomy.similarity is None
    assert anatomy.weight_error_plain is None
    assert anatomy.key_shift_plain > 0


def test_wide_operands_are_examined_as_a_kernel_would_round_them() -> None:
    call, _ = called(Attention(), "float32")
    assert examine(call, "here").numerics == "kernel"
    assert examine(call, "here", "paper").numerics == "paper"


def planted(*, tokens: Tensor, bias: float = 0.0) -> Examined:
    """A batch with one head of known properties: `tokens` [n, 1, D] are its (PK)[T]."""
    error = torch.full((1, 1, 8), bias, dtype=torch.float64)
    error[..., 3] += 10.0
    return Examined(
        origin="planted",
        numerics="kernel",
        offset=torch.tensor([2.0]),
        delta_error=error,
        by_feature=torch.tensor([[0.0, 3.0, -1.0, 0.0]], dtype=torch.float64),
        agreement=torch.tensor([[0.0, 1.0, -1.0, 0.0]], dtype=torch.float64),
        tied=torch.arange(8).eq(3).view(1, 1, 8),
        outward=torch.tensor([[0.0], [1.0]], dtype=torch.float64),
        weight_error=torch.ones(2, 1, 4, 5, dtype=torch.float64) * torch.tensor([2.0, 1.0]).view(2, 1, 1, 1),
        weight_norm=torch.tensor([10.0], dtype=torch.float64),
        by_equation=torch.ones(1, 4, 5, dtype=torch.float64),
        key_shift=torch.ones(2, 1, 4, dtype=torch.float64) * torch.tensor([2.0, 0.0]).view(2, 1, 1),
        mean_key=-torch.ones(1, 4, dtype=torch.float64),
        mixed_keys=tokens,
        inputs=torch.ones(len(tokens), 5, dtype=torch.float64),
    )


def test_the_numbers_of_a_planted_head_come_out() -> None:
    alike = head_anatomy(0, 0, [planted(tokens=torch.ones(6, 1, 4, dtype=torch.float64)) for _ in range(4)])
    assert alike.similarity == pytest.approx(1.0)
    assert alike.spectrum[0] == pytest.approx(1.0)
    assert alike.top_positions[0] == pytest.approx((3, 1.0))
    assert alike.top_features[0] == pytest.approx((1, 0.75, 1.0))
    assert alike.one_sidedness == pytest.approx(1.0)
    assert alike.tied_share_of_error == pytest.approx(1.0)
    assert alike.weight_coherence_plain == pytest.approx(4.0)  # four identical errors
    assert alike.weight_error_rank_one == pytest.approx(1.0)
    assert alike.weight_error_plain == pytest.approx(2 * 20**0.5 / 10)
    assert alike.delta_share_of_weight_error == pytest.approx(0.75)
    assert alike.delta_share_of_key_shift == pytest.approx(1.0)
    assert alike.equation_2 == pytest.approx((1.0, 1.0))
    assert alike.push_plain > 100  # -(sum of dK) . mean key is 8 in every batch
    apart = head_anatomy(0, 0, [planted(tokens=torch.eye(4, dtype=torch.float64)[:, None])])
    assert apart.similarity == pytest.approx(0.0)
    assert apart.spectrum[0] == pytest.approx(0.25)


def planted_history(bias: float) -> History:
    steps = np.linspace(25.0, 5000.0, 200, dtype=np.float64)
    noise = np.random.default_rng(0).normal(0, 0.02, (len(steps), 2))
    shares = noise + np.array([bias, 0.0])
    names = ("head.score_offset", "head.row_max_abs", "head.tied_rows_one", "head.tied_rows_bf16", "head.query_norm")
    values = {name: np.stack([steps / 500, np.zeros_like(steps)], 1) for name in names}
    return History("planted", "kernel", [(0, 0), (0, 1)], steps, {**values, "head.delta_bias": shares}, [])


def test_a_one_signed_error_is_called_so_and_noise_is_not() -> None:
    signed, noise = diagnose([planted_history(0.02)], {}), diagnose([planted_history(0.0)], {})
    assert signed.named == noise.named == [(0, 0)]  # nobody was warned about; it drifted farthest
    assert signed.courses[0].delta_z is not None
    assert signed.courses[0].delta_z > 3
    assert "is one-signed" in signed.findings["delta"][0]
    assert "not one-signed" in noise.findings["delta"][0]
    assert "needs tensors" in noise.findings["carriers"][0]


def test_samples_of_single_steps_weigh_no_more_than_their_steps() -> None:
    steps = np.concatenate(
        [np.arange(100.0, 1001.0, 100.0), np.arange(1001.0, 1101.0), np.arange(1200.0, 2001.0, 100.0)]
    )
    shares = np.where((steps > 1000) & (steps <= 1100), 1.0, 0.0)[:, None]
    history = History("dense", "kernel", [(0, 0)], steps, {"head.delta_bias": shares}, [])
    ends, means = history.blocks("head.delta_bias", (0, 0))
    assert (means * np.diff(ends, prepend=0.0)).sum() == pytest.approx(100.0)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, paths = tmp_path_factory.mktemp("checkpoints"), []
    for arm in (UNTREATED, CONTROL):
        paths.append(folder / f"{arm.name}.pt")
        lab_run(TINY, arm, seed=1, trace=folder / f"{arm.name}.jsonl.gz", steps=3, checkpoint=paths[-1])
    return paths


@pytest.fixture
def examined(checkpoints: list[Path]) -> Iterator[dict[int, list[Examined]]]:
    with lab_patient(checkpoints[0]) as patient:
        yield examine_patient(patient, 2, None)


def test_a_checkpoint_of_the_laboratory_is_examined_in_every_layer(examined: dict[int, list[Examined]]) -> None:
    assert sorted(examined) == [0, 1]
    found = diagnose([], examined, heads=[(1, 0)])
    assert found.sources == ["step 3"]
    assert found.anatomies[0].rows == 2 * 4 * 16
    assert "dW_Q is" in " ".join(found.findings["delta"])
    again = json.loads(found.as_json())
    assert again["anatomies"][0]["batches"] == 2
    with pytest.raises(ValueError, match="layer 7 was not examined; the model has layers 0, 1"):
        diagnose([], examined, heads=[(7, 0)])


def test_taking_the_key_bias_out_is_tried_and_taken_back(checkpoints: list[Path]) -> None:
    with lab_patient(checkpoints[1]) as patient:  # float32: no rounding hides a change of the loss
        with torch.no_grad():
            patient.model.get_parameter("h.0.attn.c_attn.bias")[16:32] = 3.0
        before = [parameter.detach().clone() for parameter in patient.model.parameters()]
        trial = try_removal(patient, [(0, 1)])
        assert isinstance(trial, Trial)
        assert trial.loss_after == pytest.approx(trial.loss_before, rel=1e-5)
        assert list(trial.added_nats) == ["layer 0 key head 1"]
        assert all(torch.equal(old, new) for old, new in zip(before, patient.model.parameters(), strict=True))
        patient.model.get_parameter("h.0.attn.c_attn.bias").requires_grad_(False)
        refused = try_removal(patient, [(0, 1)])
        assert isinstance(refused, str)
        assert "has no bias on its keys" in refused
        found = diagnose([planted_history(0.0)], examine_patient(patient, 2, None), heads=[(0, 0)], trials=[trial])
    assert "without it the loss" not in " ".join(found.advice)  # nobody was warned about it
    found.courses[0] = replace(found.courses[0], warned_step=4000, cause="rounding")
    explain(found)
    assert "Tried at step 3: the bias of the keys adds" in found.advice[-1]


def test_two_checkpoints_of_one_run_are_compared_across_steps(checkpoints: list[Path]) -> None:
    found: list[Examined] = []
    for path in checkpoints:
        with lab_patient(path) as patient:
            found += [replace(each, origin=path.stem) for each in examine_patient(patient, 2, None)[0]]
    anatomy = head_anatomy(0, 0, found)
    assert anatomy.similarity_across is not None
    assert -1 <= anatomy.similarity_across <= 1


def own_model() -> tuple[nn.Module, Callable[[], Tensor]]:
    """What a person writes to have their own model diagnosed."""
    torch.manual_seed(0)
    model = Model(Attention())
    return model, lambda: model(torch.randint(32, (2, 12))).square().mean()


def test_any_model_with_its_loss_can_be_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    model, _ = own_model()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    with own_patient("test_diagnose:own_model", tmp_path / "state.pt") as patient:
        examined = examine_patient(patient, 2, None)
    assert diagnose([], examined).anatomies[0].head in (0, 1)


def foreshock(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def test_the_command_joins_a_trace_and_a_checkpoint(tmp_path: Path, checkpoints: list[Path]) -> None:
    said = foreshock(
        "diagnose", str(TRACES / "key-bias_fa2_batch32.jsonl.gz"), str(checkpoints[0]), "--head", "0.0",
        "--batches", "2", "--json", str(tmp_path / "d.json"), "--picture", str(tmp_path / "d.png"),
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    for words in ("warned at step", "In delta?", "dW_Q is", "foreshock switch RUN --layer 0 --head 0"):
        assert words in said.output
    found = json.loads((tmp_path / "d.json").read_text())
    assert found["named"] == [[0, 0]]
    assert found["courses"][0]["cause"] == "rounding"
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")


def test_a_healthy_trace_gets_no_advice_but_to_keep_watching() -> None:
    said = foreshock("diagnose", str(TRACES / "key-bias_fp32_batch32.jsonl.gz"))
    assert said.exit_code == 0
    assert "no warning" in said.output
    assert "Keep watching" in said.output


def test_a_run_of_the_service_is_diagnosed_like_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreshock.lab.recording.history._POINTS", 8)
    trace = TRACES / "key-bias_fa2_batch32.jsonl.gz"
    with LiveService(tmp_path) as service:
        played = foreshock("replay", str(trace), "--url", service.url, "--run", "played")
        assert played.exit_code == 0, played.output
        history, same = live("played", service.url, None), recorded(trace)
        with pytest.raises(ValueError, match="no run 'nobody'"):
            live("nobody", service.url, None)
        rank = FakeRank(run="young")
        body = rank.batch(rank.started()).model_dump_json()
        httpx.post(f"{service.url}/v1/batches", content=body, headers={"Content-Type": "application/json"})
        with pytest.raises(ValueError, match="young has sent no sample"):
            live("young", service.url, None)
    assert history.heads == same.heads
    at = np.searchsorted(same.steps, history.steps)
    np.testing.assert_allclose(
        history.values["head.score_offset"], same.values["head.score_offset"][at], rtol=1e-6, equal_nan=True
    )
    one, other = diagnose([history], {}), diagnose([same], {})
    assert one.named[0] == other.named[0]
    assert one.courses[0].warned_step == other.courses[0].warned_step


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing.jsonl.gz"], "No such file"),
        (["{folder}/text"], "is nothing that torch loads safely"),
        (["{folder}/other.pt"], "is no checkpoint of the laboratory"),
        (["{folder}/number.pt"], "holds a int; give a checkpoint"),
        (["math:pi"], "is no function that returns (model, loss)"),
        (["{trace}", "--head", "first"], "names no head; write LAYER.HEAD"),
        (["{trace}", "--head", "9.9"], "has no layer 9 head 9"),
        (["{trace}", "--numerics", "fp8"], "numerics 'fp8' does not exist"),
        (["some-run", "--url", "http://127.0.0.1:9"], "no service answers at http://127.0.0.1:9"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused_with_a_sentence(
    words: list[str], sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("no checkpoint")
    torch.save({"weights": torch.zeros(1)}, tmp_path / "other.pt")
    torch.save(3, tmp_path / "number.pt")
    trace = str(TRACES / "key-bias_fp32_batch32.jsonl.gz")
    said = foreshock("diagnose", *(word.format(folder=tmp_path, trace=trace) for word in words))
    assert said.exit_code == 1
    assert sentence in (said.output + capfd.readouterr().err)


def test_a_layer_without_a_backward_is_named() -> None:
    call, _ = called(Attention())
    with pytest.raises(ValueError, match=r"layer 0 \(attention\) saw no backward"):
        examine(replace(call, grad_out=None), "here")
