"""`assess` and the doctor name what fails most trainings first: hidden rows, types of scores, adapters, loss scale."""

import copy

import torch
from rich.console import Console
from tests.lab.patients import adapted, attention_with_weights, eager, left_padded, qwen
from tests.monitor.tiny_models import batch, tiny_gpt

import foreshock
from foreshock.cli.doctor import report_model
from foreshock.monitor.assessment import Assessment


def line(seen: Assessment, start: str) -> str:
    return next((line for line in seen.lines if line.startswith(f"{start}:")), "")


def test_rows_that_the_mask_of_a_sample_batch_hides_are_counted_with_the_remedy() -> None:
    model, loss = left_padded()
    seen = foreshock.assess(model, loss=loss)
    assert line(seen, "Mask").startswith("Mask: 24 of 72 rows of the sample batch see no key")
    assert "  Remedy: let every row see a key, at least its own, or pad on the right." in seen.lines
    assert line(foreshock.assess(model), "Mask") == ""


def test_a_sample_batch_leaves_weights_and_gradients_as_they_were() -> None:
    model, loss = left_padded()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    before = copy.deepcopy(model.state_dict())
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    foreshock.assess(model, loss=loss)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(parameter.grad is None for parameter in list(model.parameters())[1:])
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]


def test_the_type_of_scores_is_that_of_the_batch_and_eager_float16_is_warned_of() -> None:
    model, loss = eager()
    seen = foreshock.assess(model, loss=loss)
    assert "overflow past 65,504" in line(seen, "Scores")
    assert "GradScaler" in line(seen, "Loss scale")
    assert "attention ran in float16" in line(seen, "Types")
    assert "(float16, causal" in line(seen, "Attention")
    assert line(foreshock.assess(model), "Scores") == ""  # its parameters are float32
    assert "rounds them to bfloat16" in line(foreshock.assess(qwen("eager").bfloat16()), "Scores")
    sound = foreshock.assess(qwen("sdpa").bfloat16())
    assert (line(sound, "Scores"), line(sound, "Loss scale")) == ("", "")


def test_adapters_are_named_with_what_they_keep_from_being_measured() -> None:
    model, loss = adapted()
    seen = foreshock.assess(model, loss=loss)
    assert line(seen, "Adapters").startswith("Adapters: 3 of 3 layers have them on queries or keys.")
    assert line(foreshock.assess(tiny_gpt()), "Adapters") == ""


def test_a_batch_whose_loss_is_not_finite_is_sent_to_diagnose() -> None:
    model = tiny_gpt()
    seen = foreshock.assess(model, loss=lambda: next(model.parameters()).sum() * float("nan"))
    assert "Run foreshock diagnose" in line(seen, "Batch")


def test_a_batch_in_float32_is_not_called_open_to_rounding() -> None:
    model = tiny_gpt()
    seen = foreshock.assess(model, loss=lambda: model(batch(1)).square().mean())
    assert "not in this run" in line(seen, "Drift by rounding")
    assert "open to it" in line(foreshock.assess(model), "Drift by rounding")


def test_a_layer_that_the_batch_does_not_measure_is_named_with_the_remedy() -> None:
    model, loss = attention_with_weights()
    said = line(foreshock.assess(model, loss=loss), "Batch")
    assert "native attention, not measured" in said
    assert "give need_weights=False" in said


def test_a_model_on_the_cpu_gets_no_figures_of_a_gpu() -> None:
    assert "H200" not in str(foreshock.assess(tiny_gpt()))


def test_the_doctor_runs_the_batch_of_a_factory_that_returns_a_loss() -> None:
    console = Console(record=True, width=250)
    report_model("tests.lab.patients:left_padded", console)
    assert "Mask: 24 of 72 rows of the sample batch see no key" in console.export_text()
