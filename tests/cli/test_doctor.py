"""What the machine can do and what would be watched, as `foreshock doctor` says it."""

import json
import re
from pathlib import Path

import pytest
from tests.cli.typed import foreshock

from foreshock.cli import doctor
from foreshock.monitor import assessment


def test_doctor_checks_attention_and_says_what_is_absent_also_as_json() -> None:
    done = foreshock("doctor", "--url", "http://127.0.0.1:9")
    assert done.exit_code == 0, done.output
    for words in ("within", "every row counted", "none answers at http://127.0.0.1:9"):
        assert words in done.output
    examined = foreshock("doctor", "--json", "--url", "http://127.0.0.1:9")
    assert {finding["what"] for finding in json.loads(examined.output)} >= {"foreshock", "service"}


def test_doctor_says_what_pytorch_picks_here_and_what_each_choice_costs_as_it_was_measured() -> None:
    [said] = [each.detail for each in doctor._attention() if each.what == "PyTorch's attention"]
    assert re.search(r"picks (cuDNN|flash|efficient|math) on (cpu|cuda) \(bfloat16", said)
    costs = {device: assessment.costs(device) for device in ("cpu", "cuda")}
    assert any(said.endswith(cost) for cost in costs.values())
    for file, variant in (("agent_h200.json", "kernels_agent"), ("agent_kept_h200.json", "keep_agent")):
        figures = json.loads((Path(__file__).parents[2] / "src/foreshock/benchmarks" / "results" / file).read_text())
        for measured in figures["shapes"][:2]:
            assert f"{measured['ratios'][f'{variant} / none'] - 1:.1%}".replace("%", " %") in costs["cuda"]


def test_doctor_lists_what_would_be_watched_in_a_model_once() -> None:
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
def test_doctor_refuses_what_is_no_model_with_a_sentence(path: str, sentence: str) -> None:
    done = foreshock("doctor", path)
    assert done.exit_code == 1
    assert sentence in done.stderr
