"""What the machine can do and what would be watched, as `foreshock doctor` says it."""

import pytest
from tests.cli.typed import foreshock


def test_doctor_checks_attention_and_says_what_is_absent() -> None:
    done = foreshock("doctor", "--url", "http://127.0.0.1:9")
    assert done.exit_code == 0, done.output
    assert "within" in done.output
    assert "every row counted" in done.output
    assert "none answers at http://127.0.0.1:9" in done.output


def test_doctor_lists_what_would_be_watched_in_a_model_once() -> None:
    done = foreshock("doctor", "tests.monitor.tiny_models:tiny_gpt")
    assert done.exit_code == 0, done.output
    assert (done.stdout + done.stderr).count("W_Q and W_K") == 1
    assert "W_Q and W_K" in done.stdout


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("no_colon", "write module:factory"),
        ("json:dumps_nothing", "json has none that is called 'dumps_nothing'"),
        ("json:JSONDecoder", "is not a callable that returns a torch.nn.Module"),
        ("torch.nn:Identity", "no attention was found in Identity"),
    ],
)
def test_doctor_refuses_what_is_no_model_with_a_sentence(path: str, sentence: str) -> None:
    done = foreshock("doctor", path)
    assert done.exit_code == 1
    assert sentence in done.stderr
