"""The figures that pages cite of a recorded run are the recording's own."""

import json
from pathlib import Path

import pytest

from foreshock.contract.slots import Slot
from foreshock.lab.recording.trace import read_trace
from foreshock.lab.shown.curves import head_curves, main

RUN = Path(__file__).parents[2] / "src/foreshock/lab/shown/pytorch-flash.jsonl.gz"


def test_figures_and_picture_of_a_recorded_failure(tmp_path: Path) -> None:
    trace = read_trace(RUN)
    failing = trace.heads[0]
    main(RUN, ["{}.{}".format(*failing)], 500, tmp_path / "figures.json", tmp_path / "picture.png")
    found = json.loads((tmp_path / "figures.json").read_text())
    curve = found["heads"]["layer {} head {}".format(*failing)]
    words = {s.step: words[:1].view(float) for s in trace.samples if (words := s.words()) is not None}
    assert curve["curve"][-1]["largest_score"] == words[max(words)][0, Slot.ROW_MAX_ABS]
    past = [step for step, found in words.items() if found[0, Slot.ROW_MAX_ABS] >= 512]
    assert curve["first_score_of_512"] == min(past, default=None)
    assert [part["last_step"] for part in found["parts"]][-1] == trace.steps.step[-1]
    assert (tmp_path / "picture.png").read_bytes()[1:4] == b"PNG"


def test_a_head_that_was_not_recorded_is_named() -> None:
    with pytest.raises(ValueError, match="layer 40 head 0 was not recorded"):
        head_curves(read_trace(RUN), [(40, 0)])
