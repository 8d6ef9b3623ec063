"""An agent's state as a file beside a checkpoint, in folders that a team may write to."""

from pathlib import Path

import pytest
from tests.monitor.tiny_models import tiny_gpt

from foreshock.monitor import attach
from foreshock.monitor.callbacks.shared import read_state, write_state


@pytest.mark.promise("A17")
def test_a_link_in_the_place_of_the_unfinished_file_is_not_followed(tmp_path: Path) -> None:
    precious, path = tmp_path / "checkpoint.pt", tmp_path / "foreshock_0.json"
    precious.write_text("precious")
    (tmp_path / "foreshock_0.json.unfinished").symlink_to(precious)
    with attach(tiny_gpt(), quiet=True) as agent:
        write_state(agent, path)
        saved = read_state(path)
        assert saved is not None
        assert saved["run"] == agent.run
    assert precious.read_text() == "precious"
    assert not path.is_symlink()
