"""`foreshock doctor`: checks of the machine, and the layers that foreshock would watch."""

import json
import re
from pathlib import Path

import pytest
from tests.cli.typed import foreshock

from foreshock.cli import doctor
from foreshock.monitor import assessment


def test_doctor_checks_attention_and_reports_a_missing_service_as_text_and_json() -> None:
    done = foreshock("doctor", "--url", "http://127.0.0.1:9")
    assert done.exit_code == 0, done.output
    for words in ("within", "every row counted", "none answers at http://127.0.0.1:9"):
        assert words in done.output
    as_json = foreshock("doctor", "--json", "--url", "http://127.0.0.1:9")
    assert {finding["what"] for finding in json.loads(as_json.output)} >= {"foreshock", "service"}


def test_doctor_reports_the_attention_backend_and_its_measured_cost() -> None:
    [detail] = [each.detail for each in doctor._attention() if each.what == "PyTorch's attention"]
    assert re.search(r"picks (cuDNN|flash|efficient|math) on (cpu|cuda) \(bfloat16", detail)
    costs = {device: assessment.costs(device) for device in ("cpu", "cuda")}
    assert any(detail.endswith(cost) for cost in costs.values())
    for file, variant in (("agent_h200.json", "kernels_agent"), ("agent_kept_h200.json", "keep_agent")):
        figures = json.loads((Path(__file__).parents[2] / "src/foreshock/benchmarks" / "results" / file).read_text())
        for measured in figures["shapes"][:2]:
            assert f"{measured['ratios'][f'{variant} / none'] - 1:.1%}".replace("%", " %") in costs["cuda"]


def test_doctor_lists_the_layers_of_a_model_once() -> None:
    done = foreshock("doctor", "tests.monitor.tiny_models:tiny_gpt")
    assert done.exit_code == 0, done.output
    assert (done.stdout + done.stderr).count("W_Q and W_K") == 1
    assert "W_Q and W_K" in done.stdout


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("no_colon", "write module:factory"),
        ("json:dumps_nothing", "the module json has no callable 'dumps_nothing'"),
        ("json:JSONDecoder", "is not a callable that returns a torch.nn.Module"),
        ("torch.nn:Identity", "no attention was found in Identity"),
    ],
)
def test_doctor_rejects_an_invalid_model_with_a_reason(path: str, sentence: str) -> None:
    done = foreshock("doctor", path)
    assert done.exit_code == 1
    assert sentence in done.stderr
