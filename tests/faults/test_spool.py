"""The spool file: truncated, corrupted, full, shared or replaced. Complete batches are never lost."""

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
NEXT_BATCH = (9, b"later")
CONTENT = b"".join(frame(sequence, payload) for sequence, payload in BATCHES)


def file_of(folder: Path, boot: str = "a", run: str = "mine") -> Path:
    return folder / f"{hashlib.sha256(run.encode()).hexdigest()[:32]}-{boot}.spool"


def spool_in(folder: Path, boot: str = "a", max_bytes: int = 2**20, run: str = "mine") -> closing[Spool]:
    """The open spool of a running process."""
    return closing(Spool(PrivateFolder(folder), run, boot, max_bytes))


def batch_of(boot: str, sequence: int = 1, *, run: str = "mine", padding: int = 0) -> bytes:
    return json.dumps({"run": run, "boot": boot, "sequence": sequence, "events": [], "padding": "x" * padding}).encode()


def leave_spool(directory: Path, run: str, boot: str, *payloads: bytes) -> Path:
    """The spool file that a process of this boot leaves if it dies with unsent batches."""
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


def append_all(spool: Spool, stored: list[tuple[int, bytes]]) -> None:
    for batch in BATCHES:
        spool.append(*batch)
        stored.append(batch)


def reread(folder: Path, content: bytes) -> list[tuple[int, bytes]]:
    """The batches read from a file with this content. Also checks that a new batch can be appended."""
    file_of(folder).write_bytes(content)
    with spool_in(folder) as spool:
        assert spool.path.stat().st_size == spool._end, "a truncated tail must be cut off"
        spool.append(*NEXT_BATCH)
        *found, last = drain(spool)
        assert last == NEXT_BATCH
        return found


def test_batches_are_read_in_order_and_an_empty_spool_deletes_its_file(tmp_path: Path) -> None:
    with spool_in(tmp_path) as spool:
        for sequence, payload in BATCHES:
            assert spool.append(sequence, payload)
        assert (spool.boot, spool.highest, len(spool)) == ("a", 3, 3)
        assert file_of(tmp_path).read_bytes() == CONTENT
        assert drain(spool) == BATCHES
        assert spool.path.stat().st_size == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.promise("A5")
def test_file_truncated_at_any_byte_returns_every_complete_batch(tmp_path: Path) -> None:
    ends = [len(b"".join(frame(*batch) for batch in BATCHES[: n + 1])) for n in range(len(BATCHES))]
    for cut in range(len(CONTENT) + 1):
        survivors = sum(end <= cut for end in ends)
        assert reread(tmp_path, CONTENT[:cut]) == BATCHES[:survivors]


@pytest.fixture
def fuzz(sizes: Any, record_property: Callable[[str, Any], None]) -> settings:
    """Hypothesis settings with the tier's number of cases."""
    cases = sizes("spool_cases", quick=200, long=50_000)
    record_property("cases", cases)
    return sizes.fuzzed(cases)  # type: ignore[no-any-return]


@pytest.mark.promise("A5")
def test_any_changed_byte_loses_at_most_one_batch(tmp_path: Path, fuzz: settings) -> None:
    @fuzz
    @given(position=st.integers(0, len(CONTENT) - 1), flip=st.integers(1, 255))
    def case(position: int, flip: int) -> None:
        damaged = bytearray(CONTENT)
        damaged[position] ^= flip
        found = reread(tmp_path, bytes(damaged))
        missing = [batch for batch in BATCHES if batch not in found]
        assert len(missing) <= 1
        assert found == [batch for batch in BATCHES if batch in found]

    case()


@pytest.mark.promise("A5")
def test_batches_after_random_bytes_are_recovered(tmp_path: Path, fuzz: settings) -> None:
    @fuzz
    @given(junk=st.binary(max_size=300))
    def case(junk: bytes) -> None:
        assert reread(tmp_path, junk + CONTENT)[-3:] == BATCHES

    case()


@pytest.mark.promise("A5")
def test_batches_after_a_damaged_block_are_recovered_across_chunk_boundaries(tmp_path: Path) -> None:
    for length in range(spooling._CHUNK - 8, spooling._CHUNK + 8):
        assert reread(tmp_path, bytes(length) + CONTENT) == BATCHES


@pytest.mark.promise("A5")
def test_disk_full_at_any_byte_preserves_complete_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free_bytes in range(len(CONTENT)):
        left = [free_bytes]

        def write(fd: int, data: bytes, offset: int, left: list[int] = left) -> int:
            if left[0] == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = os.pwrite(fd, bytes(data)[: left[0]], offset)
            left[0] -= written
            return written

        monkeypatch.setattr(spooling, "_pwrite", write)
        stored: list[tuple[int, bytes]] = []
        with spool_in(tmp_path, str(free_bytes)) as spool:
            with pytest.raises(OSError, match="No space left"):
                append_all(spool, stored)
            assert spool.path.read_bytes() == b"".join(frame(*batch) for batch in stored)
            assert drain(spool) == stored
        assert len(stored) < len(BATCHES)


@pytest.mark.promise("A5")
@pytest.mark.parametrize("position", range(len(frame(*BATCHES[1]))))
def test_batch_corrupted_on_disk_is_skipped_by_the_running_process(tmp_path: Path, position: int) -> None:
    with spool_in(tmp_path) as spool:
        append_all(spool, [])
        with spool.path.open("r+b") as file:
            file.seek(len(frame(*BATCHES[0])) + position)
            [byte] = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        assert drain(spool) == [BATCHES[0], BATCHES[2]]


def test_space_of_sent_batches_is_reused_before_the_spool_is_empty(tmp_path: Path) -> None:
    payload = b"x" * 100
    with spool_in(tmp_path, max_bytes=1000) as spool:
        assert spool.append(1, payload)
        for sequence in range(2, 100):
            assert spool.append(sequence, payload)
            assert spool.peek() == (sequence - 1, payload)
            spool.pop()


def test_full_store_rejects_batches_but_accepts_forced_ones_up_to_a_limit(tmp_path: Path) -> None:
    with spool_in(tmp_path, max_bytes=100) as spool:
        for store in (spool, MemoryStore("a", 100)):
            assert store.append(1, b"x" * 60)
            assert not store.append(2, b"x" * 60)
            assert store.append(2, b"x" * 60, force=True)
            assert not store.append(3, b"x" * 60, force=True)
            assert [sequence for sequence, _ in drain(store)] == [1, 2]


def test_reusing_space_of_sent_batches_loses_no_unsent_batch(tmp_path: Path) -> None:
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
def test_leftovers_are_spools_of_dead_processes_of_the_same_run(tmp_path: Path) -> None:
    for run, boot in (("mine", "0001"), ("mine", "0002"), ("other", "0003")):
        leave_spool(tmp_path, run, boot, batch_of(boot, run=run))
    folder = PrivateFolder(tmp_path)
    with spool_in(tmp_path, "0004") as living:
        living.append(1, batch_of("0004"))
        found, removed = leftovers(folder, "mine", 2**20)
        assert ([s.boot for s in found], removed) == (["0001", "0002"], 0)
        assert [drain(s) for s in found] == [[(1, batch_of("0001"))], [(1, batch_of("0002"))]]
        for spool in found:
            spool.close()
    assert leftovers(folder, "mine", 2**20)[0][0].boot == "0004"


START_PROGRAM = """
import importlib.util, os, sys
from pathlib import Path
for file in map(Path, sys.argv[4:]):  # loaded as single files, because the package imports PyTorch
    found = importlib.util.spec_from_file_location(f"foreshock.monitor.transport.{file.stem}", file)
    spool = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(spool)
directory, name = Path(sys.argv[1]), sys.argv[2]
spools, unsent = [], []
sys.stdin.readline()
for n in range(int(sys.argv[3])):
    folder = spool.PrivateFolder(directory)
    unsent += spool.leftovers(folder, "mine", 2**20)[0]
    spools.append(spool.Spool(folder, "mine", f"{n:04}-{name}", 2**20))
there = [s.path.exists() and os.path.samestat(s.path.stat(), os.fstat(s._fd)) for s in spools]
print(there.count(False), flush=True)
sys.stdin.readline()
"""


@pytest.mark.promise("A8")
def test_concurrent_starts_do_not_unlink_or_block_other_spools(
    tmp_path: Path, sizes: Any, record_property: Callable[[str, Any], None]
) -> None:
    spools = sizes("spools_of_each", quick=6, long=60)
    record_property("spools of 8 processes", 8 * spools)
    modules = [str(module.__file__) for module in (private_folder, spooling)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START_PROGRAM, str(tmp_path), str(name), str(spools), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in range(8)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    unlinked = [process.stdout.readline() for process in processes if process.stdout is not None]
    for process in processes:
        process.communicate("end\n")
    assert (
        unlinked == ["0\n"] * 8
    )  # an empty line means that the process failed because it could not lock its own spool


@pytest.mark.promise("A8")
def test_spool_unlinked_between_open_and_lock_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, original_open = file_of(tmp_path), os.open
    open_once = [True]

    def open_then_unlink(name: Any, *rest: Any, **folder: Any) -> int:
        fd = original_open(name, *rest, **folder)
        if name == path.name and open_once:
            open_once.clear()
            path.unlink()
        return fd

    monkeypatch.setattr(os, "open", open_then_unlink)
    with spool_in(tmp_path) as spool:
        spool.append(7, b"unsent")
        with path.open("rb") as file:
            assert file.read() == frame(7, b"unsent")


def test_leftovers_beyond_the_size_limit_are_removed_oldest_first(tmp_path: Path) -> None:
    for boot in ("0001", "0002", "0003"):
        size = leave_spool(tmp_path, "mine", boot, batch_of(boot)).stat().st_size
    found, removed = leftovers(PrivateFolder(tmp_path), "mine", 2 * size + 10)
    assert ([s.boot for s in found], removed) == (["0002", "0003"], 1)
    for spool in found:
        spool.close()


@pytest.mark.promise("A16")
@pytest.mark.promise("A17")
def test_run_name_cannot_escape_the_folder_and_files_are_private(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        path = leave_spool(tmp_path / "created" / "too", "../../etc/run", "0001", b"x")
    finally:
        os.umask(umask)
    assert path.resolve().is_relative_to(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    created = [parent for parent in path.parents if parent.is_relative_to(tmp_path) and parent != tmp_path]
    assert [parent.stat().st_mode & 0o777 for parent in created] == [0o700] * 2


@pytest.mark.promise("A17")
@pytest.mark.parametrize(
    "batch",
    [
        batch_of("0001", run="another"),
        batch_of("0009"),
        batch_of("0001", sequence=7),
        b"not a batch",
        b"[]",
        b"[" * 100_000,
    ],
)
def test_leftover_batch_of_another_run_or_boot_or_sequence_is_skipped(tmp_path: Path, batch: bytes) -> None:
    leave_spool(tmp_path, "mine", "0001", batch, batch_of("0001", 2))
    [found], _ = leftovers(PrivateFolder(tmp_path), "mine", 2**20)
    with closing(found):
        assert drain(found) == [(2, batch_of("0001", 2))]


def plant(folder: Path, kind: str) -> tuple[Path, bytes]:
    """Create a file of this kind at the path of a spool; returns the path and the content to preserve."""
    path, precious = file_of(folder, "0001"), b"precious" * 1000
    if kind == "a link to a file":
        target = folder.parent / "checkpoint.pt"
        target.write_bytes(precious)
        path.symlink_to(target)
    elif kind == "a hard link to a file":
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
    ("kind", "reason"),
    [
        ("a link to a file", "links are not followed"),
        ("a hard link to a file", "has a second name"),
        ("another file", "does not contain batches"),
        ("a file that others may write", "may be written to by others"),
        ("a file too large", "is larger than 2097152 bytes, twice FORESHOCK_SPOOL_BYTES"),
    ],
)
def test_file_that_is_not_a_valid_spool_is_reported_and_unchanged(
    kind: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "spool"
    leave_spool(directory, "mine", "0002", batch_of("0002"))
    path, precious = plant(directory, kind)
    [found], removed = leftovers(PrivateFolder(directory), "mine", 2**20)
    assert (found.boot, removed) == ("0002", 0)
    found.close()
    with pytest.raises(PermissionError, match=reason):
        spool_in(directory, "0001")
    assert [reason in record.getMessage() and str(path) in record.getMessage() for record in caplog.records] == [True]
    with path.open("rb") as file:
        assert file.read(len(precious)) == precious


MODES = (0o777, 0o1777, 0o770, 0o702)


@pytest.mark.promise("A17")
@pytest.mark.parametrize("kind", [*MODES, "of another user", "a link", "a file"])
def test_shared_or_foreign_folder_link_and_file_are_rejected(
    kind: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own := tmp_path / "own").mkdir(mode=0o700)
    folder, reason = tmp_path / "place", "is not a folder; links are not followed"
    if isinstance(kind, int):
        (folder := own).chmod(kind)
        reason = f"{own} may be written to by others (mode {kind:o})"
    elif kind == "of another user":
        folder, user = own, own.stat().st_uid
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        reason = f"belongs to user {user}, not to user"
    else:
        folder.symlink_to(own) if kind == "a link" else folder.write_text("")
    with pytest.raises(PermissionError) as refused:
        PrivateFolder(folder)
    assert reason in str(refused.value.strerror)
    assert not isinstance(kind, int) or "chmod go-w" in str(refused.value.strerror)
    assert list(own.iterdir()) == []


@pytest.mark.promise("A17")
def test_replaced_folder_path_does_not_redirect_file_access(tmp_path: Path) -> None:
    path, victim = tmp_path / "spool", tmp_path / "victim"
    victim.mkdir()
    (victim / "x.spool").write_text("precious")
    folder = PrivateFolder(path)
    (path / "x.spool").write_text("")
    path.rename(tmp_path / "away")  # the owner of the parent folder can rename it
    path.symlink_to(victim)
    os.close(folder.open_locked("x.spool", 0.0))
    folder.remove("x.spool")
    assert (victim / "x.spool").read_text() == "precious"
    assert list((tmp_path / "away").iterdir()) == []


@pytest.mark.parametrize("kind", ["a fifo", "a dangling link", "a file of another user"])
@pytest.mark.promise("A17")
def test_fifo_dangling_link_and_foreign_file_are_not_opened(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path = PrivateFolder(tmp_path), tmp_path / "x.spool"
    if kind == "a fifo":
        os.mkfifo(path, 0o600)
    elif kind == "a dangling link":
        path.symlink_to(tmp_path / "created by open")
    else:
        path.touch(0o600)
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(PermissionError):
        folder.open_locked("x.spool", 0.0, os.O_CREAT)
    assert not (tmp_path / "created by open").exists()
