"""The spool: torn, flipped, full, read-only, vanished. Nothing before a torn tail is lost; training never notices."""

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.monitor.transport import private_folder
from foreshock.monitor.transport import spool as spooling
from foreshock.monitor.transport.private_folder import PrivateFolder
from foreshock.monitor.transport.spool import MemoryStore, Spool, Store, frame, leftovers

BATCHES = [(1, b'{"first":1}'), (2, b"second"), (3, b'{"third":"' + b"x" * 40 + b'"}')]
LATER = (9, b"later")
WHOLE = b"".join(frame(sequence, payload) for sequence, payload in BATCHES)


def file_of(folder: Path, boot: str = "a", run: str = "mine") -> Path:
    return folder / f"{hashlib.sha256(run.encode()).hexdigest()[:32]}-{boot}.spool"


def spool_in(folder: Path, boot: str = "a", max_bytes: int = 2**20, run: str = "mine") -> closing[Spool]:
    """The spool of a living boot."""
    return closing(Spool(PrivateFolder(folder), run, boot, max_bytes))


def batch_of(boot: str, sequence: int = 1, *, run: str = "mine", padding: int = 0) -> bytes:
    return json.dumps({"run": run, "boot": boot, "sequence": sequence, "events": [], "padding": "x" * padding}).encode()


def left_behind(directory: Path, run: str, boot: str, *payloads: bytes) -> Path:
    """What a process of this boot leaves that dies with batches unsent."""
    with spool_in(directory, boot, run=run) as dead:
        for sequence, payload in enumerate(payloads, 1):
            dead.append(sequence, payload)
        return dead.path


def drain(spool: Store) -> list[tuple[int, bytes]]:
    found = []
    while (waiting := spool.peek()) is not None:
        found.append(waiting)
        spool.pop()
    return found


def append_all(spool: Spool, kept: list[tuple[int, bytes]]) -> None:
    for batch in BATCHES:
        spool.append(*batch)
        kept.append(batch)


def reread(folder: Path, content: bytes) -> list[tuple[int, bytes]]:
    """What a spool of this content gives back, a batch that is appended to it included."""
    file_of(folder).write_bytes(content)
    with spool_in(folder) as spool:
        assert spool.path.stat().st_size == spool._end, "a torn tail is cut"
        spool.append(*LATER)
        *found, last = drain(spool)
        assert last == LATER
        return found


def test_batches_come_back_in_order_and_an_emptied_spool_leaves_no_file(tmp_path: Path) -> None:
    with spool_in(tmp_path) as spool:
        for sequence, payload in BATCHES:
            assert spool.append(sequence, payload)
        assert (spool.boot, spool.highest, len(spool)) == ("a", 3, 3)
        assert file_of(tmp_path).read_bytes() == WHOLE
        assert drain(spool) == BATCHES
        assert spool.path.stat().st_size == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.promise("A5")
def test_a_file_torn_at_every_byte_gives_back_every_batch_before_the_tear(tmp_path: Path) -> None:
    ends = [len(b"".join(frame(*batch) for batch in BATCHES[: n + 1])) for n in range(len(BATCHES))]
    for cut in range(len(WHOLE) + 1):
        survivors = sum(end <= cut for end in ends)
        assert reread(tmp_path, WHOLE[:cut]) == BATCHES[:survivors]


@pytest.fixture
def many(sizes: Any, record_property: Callable[[str, Any], None]) -> settings:
    """Runs a case as often as the tier asks for."""
    cases = sizes("spool_cases", quick=200, long=50_000)
    record_property("cases", cases)
    return sizes.fuzzed(cases)  # type: ignore[no-any-return]


@pytest.mark.promise("A5")
def test_any_changed_byte_costs_one_batch_at_most(tmp_path: Path, many: settings) -> None:
    @many
    @given(position=st.integers(0, len(WHOLE) - 1), flip=st.integers(1, 255))
    def case(position: int, flip: int) -> None:
        damaged = bytearray(WHOLE)
        damaged[position] ^= flip
        found = reread(tmp_path, bytes(damaged))
        missing = [batch for batch in BATCHES if batch not in found]
        assert len(missing) <= 1
        assert found == [batch for batch in BATCHES if batch in found]

    case()


@pytest.mark.promise("A5")
def test_any_file_at_all_is_read_without_an_exception(tmp_path: Path, many: settings) -> None:
    @many
    @given(junk=st.binary(max_size=300))
    def case(junk: bytes) -> None:
        assert reread(tmp_path, junk + WHOLE)[-3:] == BATCHES

    case()


@pytest.mark.promise("A5")
def test_batches_are_found_behind_damage_of_any_length(tmp_path: Path) -> None:
    for length in range(spooling._CHUNK - 8, spooling._CHUNK + 8):
        assert reread(tmp_path, bytes(length) + WHOLE) == BATCHES


@pytest.mark.promise("A5")
def test_a_disk_that_fills_at_every_byte_keeps_what_was_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in range(len(WHOLE)):
        left = [room]

        def write(fd: int, data: bytes, offset: int, left: list[int] = left) -> int:
            if left[0] == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = os.pwrite(fd, bytes(data)[: left[0]], offset)
            left[0] -= written
            return written

        monkeypatch.setattr(spooling, "_pwrite", write)
        kept: list[tuple[int, bytes]] = []
        with spool_in(tmp_path, str(room)) as spool:
            with pytest.raises(OSError, match="No space left"):
                append_all(spool, kept)
            assert spool.path.read_bytes() == b"".join(frame(*batch) for batch in kept)
            assert drain(spool) == kept
        assert len(kept) < len(BATCHES)


@pytest.mark.promise("A5")
@pytest.mark.parametrize("position", range(len(frame(*BATCHES[1]))))
def test_a_batch_that_decays_on_disk_while_its_process_lives_is_skipped(tmp_path: Path, position: int) -> None:
    with spool_in(tmp_path) as spool:
        append_all(spool, [])
        with spool.path.open("r+b") as file:
            file.seek(len(frame(*BATCHES[0])) + position)
            [byte] = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        assert drain(spool) == [BATCHES[0], BATCHES[2]]


def test_a_spool_that_never_empties_takes_every_batch_for_which_it_has_room(tmp_path: Path) -> None:
    payload = b"x" * 100
    with spool_in(tmp_path, max_bytes=1000) as spool:
        assert spool.append(1, payload)
        for sequence in range(2, 100):
            assert spool.append(sequence, payload)
            assert spool.peek() == (sequence - 1, payload)
            spool.pop()


def test_a_full_store_says_no_and_takes_words_all_the_same_up_to_a_bound(tmp_path: Path) -> None:
    with spool_in(tmp_path, max_bytes=100) as spool:
        for store in (spool, MemoryStore("a", 100)):
            assert store.append(1, b"x" * 60)
            assert not store.append(2, b"x" * 60)
            assert store.append(2, b"x" * 60, force=True)
            assert not store.append(3, b"x" * 60, force=True)
            assert [sequence for sequence, _ in drain(store)] == [1, 2]


def test_room_of_sent_batches_is_used_again_without_losing_the_others(tmp_path: Path) -> None:
    with spool_in(tmp_path, max_bytes=1000) as spool:
        sent, sequence = [], 0
        for _ in range(200):
            while spool.append(sequence + 1, bytes(f"{sequence + 1:050d}", "ascii")):
                sequence += 1
            waiting = spool.peek()
            assert waiting is not None
            sent.append(waiting)
            spool.pop()
            assert spool.path.stat().st_size <= 1000
        sent += drain(spool)
    assert sent == [(n, bytes(f"{n:050d}", "ascii")) for n in range(1, sequence + 1)]


@pytest.mark.promise("A8")
def test_only_spools_of_dead_processes_of_the_same_run_are_taken_up(tmp_path: Path) -> None:
    for run, boot in (("mine", "0001"), ("mine", "0002"), ("other", "0003")):
        left_behind(tmp_path, run, boot, batch_of(boot, run=run))
    folder = PrivateFolder(tmp_path)
    with spool_in(tmp_path, "0004") as living:
        living.append(1, batch_of("0004"))
        found, removed = leftovers(folder, "mine", 2**20)
        assert ([s.boot for s in found], removed) == (["0001", "0002"], 0)
        assert [drain(s) for s in found] == [[(1, batch_of("0001"))], [(1, batch_of("0002"))]]
        for old in found:
            old.close()
    assert leftovers(folder, "mine", 2**20)[0][0].boot == "0004"


STARTS = """
import importlib.util, os, sys
from pathlib import Path
for file in map(Path, sys.argv[4:]):  # alone: the package would import PyTorch
    found = importlib.util.spec_from_file_location(f"foreshock.monitor.transport.{file.stem}", file)
    spool = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(spool)
directory, name = Path(sys.argv[1]), sys.argv[2]
held, kept = [], []
sys.stdin.readline()
for n in range(int(sys.argv[3])):
    folder = spool.PrivateFolder(directory)
    kept += spool.leftovers(folder, "mine", 2**20)[0]
    held.append(spool.Spool(folder, "mine", f"{n:04}-{name}", 2**20))
there = [s.path.exists() and os.path.samestat(s.path.stat(), os.fstat(s._fd)) for s in held]
print(there.count(False), flush=True)
sys.stdin.readline()
"""


@pytest.mark.promise("A8")
def test_processes_that_start_at_once_neither_unlink_nor_block_the_spools_of_one_another(
    tmp_path: Path, sizes: Any, record_property: Callable[[str, Any], None]
) -> None:
    spools = sizes("spools_of_each", quick=6, long=60)
    record_property("spools held by 8 processes", 8 * spools)
    files = [str(module.__file__) for module in (private_folder, spooling)]
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", STARTS, str(tmp_path), str(name), str(spools), *files],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in range(8)
    ]
    for process in starts:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    unlinked = [process.stdout.readline() for process in starts if process.stdout is not None]
    for process in starts:
        process.communicate("end\n")
    assert unlinked == ["0\n"] * 8  # an empty line: the process failed, it could not lock its own spool


@pytest.mark.promise("A8")
def test_a_spool_that_another_process_removes_between_opening_and_locking_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = file_of(tmp_path), os.open
    open_once = [True]

    def open_and_lose(name: Any, *rest: Any, **place: Any) -> int:
        fd = opened(name, *rest, **place)
        if name == path.name and open_once:
            open_once.clear()
            path.unlink()
        return fd

    monkeypatch.setattr(os, "open", open_and_lose)
    with spool_in(tmp_path) as spool:
        spool.append(7, b"kept")
        with path.open("rb") as file:
            assert file.read() == frame(7, b"kept")


def test_leftovers_are_bounded_and_the_newest_are_kept(tmp_path: Path) -> None:
    for boot in ("0001", "0002", "0003"):
        size = left_behind(tmp_path, "mine", boot, batch_of(boot)).stat().st_size
    found, removed = leftovers(PrivateFolder(tmp_path), "mine", 2 * size + 10)
    assert ([s.boot for s in found], removed) == (["0002", "0003"], 1)
    for old in found:
        old.close()


@pytest.mark.promise("A16")
@pytest.mark.promise("A17")
def test_a_run_name_never_becomes_a_path_and_the_files_are_for_this_user_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        path = left_behind(tmp_path / "made" / "too", "../../etc/run", "0001", b"x")
    finally:
        os.umask(umask)
    assert path.resolve().is_relative_to(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    made = [above for above in path.parents if above.is_relative_to(tmp_path) and above != tmp_path]
    assert [above.stat().st_mode & 0o777 for above in made] == [0o700] * 2


@pytest.mark.promise("A17")
@pytest.mark.parametrize(
    "batch",
    [
        batch_of("0001", run="of-another"),
        batch_of("0009"),
        batch_of("0001", sequence=7),
        b"no batch at all",
        b"[]",
        b"[" * 100_000,
    ],
)
def test_a_batch_of_another_run_or_process_is_not_sent_with_this_ones_token(tmp_path: Path, batch: bytes) -> None:
    left_behind(tmp_path, "mine", "0001", batch, batch_of("0001", 2))
    [found], _ = leftovers(PrivateFolder(tmp_path), "mine", 2**20)
    with closing(found):
        assert drain(found) == [(2, batch_of("0001", 2))]


def planted(folder: Path, kind: str) -> tuple[Path, bytes]:
    """Something in the place of a spool, and what it is about to lose."""
    path, precious = file_of(folder, "0001"), b"precious" * 1000
    if kind == "a link to a file":
        target = folder.parent / "checkpoint.pt"
        target.write_bytes(precious)
        path.symlink_to(target)
    elif kind == "a second name of a file":
        target = folder.parent / "checkpoint.pt"
        target.write_bytes(precious)
        path.hardlink_to(target)
    elif kind == "another file":
        path.write_bytes(precious)
    elif kind == "a file that others may write":
        path.write_bytes(precious := frame(1, batch_of("0001")))
        path.chmod(0o666)
    elif kind == "a file too large":
        path.write_bytes(precious := frame(1, batch_of("0001")))
        os.truncate(path, 20 * 2**30)  # sparse
        precious += bytes(100)
    return path, precious


@pytest.mark.promise("A17")
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("a link to a file", "links are not followed"),
        ("a second name of a file", "has a second name"),
        ("another file", "does not contain batches"),
        ("a file that others may write", "may be written to by others"),
        ("a file too large", "is larger than 2097152 bytes, twice FORESHOCK_SPOOL_BYTES"),
    ],
)
def test_what_is_no_spool_is_named_and_left_as_it_is(
    kind: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "spool"
    left_behind(directory, "mine", "0002", batch_of("0002"))
    path, precious = planted(directory, kind)
    [found], removed = leftovers(PrivateFolder(directory), "mine", 2**20)
    assert (found.boot, removed) == ("0002", 0)
    found.close()
    with pytest.raises(PermissionError, match=why):
        spool_in(directory, "0001")
    assert [why in record.getMessage() and str(path) in record.getMessage() for record in caplog.records] == [True]
    with path.open("rb") as file:
        assert file.read(len(precious)) == precious


MODES = (0o777, 0o1777, 0o770, 0o702)


@pytest.mark.promise("A17")
@pytest.mark.parametrize("kind", [*MODES, "of another user", "a link", "a file"])
def test_a_folder_that_others_may_write_to_or_own_and_what_is_no_folder_are_refused(
    kind: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own := tmp_path / "own").mkdir(mode=0o700)
    place, why = tmp_path / "place", "is not a folder; links are not followed"
    if isinstance(kind, int):
        (place := own).chmod(kind)
        why = f"{own} may be written to by others (mode {kind:o})"
    elif kind == "of another user":
        place, user = own, own.stat().st_uid
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        why = f"belongs to user {user}, not to user"
    else:
        place.symlink_to(own) if kind == "a link" else place.write_text("")
    with pytest.raises(PermissionError) as refused:
        PrivateFolder(place)
    assert why in str(refused.value.strerror)
    assert not isinstance(kind, int) or "chmod go-w" in str(refused.value.strerror)
    assert list(own.iterdir()) == []


@pytest.mark.promise("A17")
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
@pytest.mark.promise("A17")
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
