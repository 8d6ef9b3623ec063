"""A folder where others may write, links, files of another user: refused with a sentence, and nothing is changed."""

import os
import stat
from pathlib import Path

import pytest

from foreshock.monitor.transport.private_folder import PrivateFolder

pytestmark = pytest.mark.promise("A17")


def modes(folder: Path) -> list[int]:
    return [stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError) as refused:
        PrivateFolder(tmp_path)
    assert f"{tmp_path} may be written to by others (mode {mode:o})" in str(refused.value.strerror)
    assert "chmod go-w" in str(refused.value.strerror)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to user") as refused:
        PrivateFolder(tmp_path)
    assert f"belongs to user {tmp_path.stat().st_uid}, not to user" in str(refused.value.strerror)


@pytest.mark.parametrize("kind", ["a link", "a file"])
def test_a_link_or_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path, kind: str) -> None:
    place, own = tmp_path / "place", tmp_path / "own"
    own.mkdir(mode=0o700)
    place.symlink_to(own) if kind == "a link" else place.write_text("")
    with pytest.raises(PermissionError) as refused:
        PrivateFolder(place)
    assert "is no folder; a link is not followed" in str(refused.value.strerror)
    assert list(own.iterdir()) == []


def test_files_are_reached_through_the_folder_that_was_looked_at_wherever_its_path_leads_later(tmp_path: Path) -> None:
    path, victim = tmp_path / "spool", tmp_path / "victim"
    victim.mkdir()
    (victim / "x.spool").write_text("precious")
    folder = PrivateFolder(path)
    (path / "x.spool").write_text("")
    path.rename(tmp_path / "away")  # who owns the folder above may do so
    path.symlink_to(victim)
    os.close(folder.open_locked("x.spool", 0.0))
    folder.remove("x.spool")
    assert (victim / "x.spool").read_text() == "precious"
    assert list((tmp_path / "away").iterdir()) == []


@pytest.mark.parametrize("kind", ["a fifo", "a link that leads nowhere", "a file of another user"])
def test_what_is_no_regular_file_of_this_user_is_not_opened(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path = PrivateFolder(tmp_path), tmp_path / "x.spool"
    if kind == "a fifo":
        os.mkfifo(path, 0o600)
    elif kind == "a link that leads nowhere":
        path.symlink_to(tmp_path / "made by the open")
    else:
        path.touch(0o600)
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(PermissionError):
        folder.open_locked("x.spool", 0.0, os.O_CREAT)
    assert not (tmp_path / "made by the open").exists()
