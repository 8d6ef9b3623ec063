"""The spool: torn, flipped, full, read-only, vanished. Nothing before a torn tail is lost; training never notices."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.monitor.transport import spool as spooling
from foreshock.monitor.transport.spool import Spool, frame, leftovers, spool_path

BATCHES = [(1, b'{"first":1}'), (2, b"second"), (3, b'{"third":"' + b"x" * 40 + b'"}')]
WHOLE = b"".join(frame(sequence, payload) for sequence, payload in BATCHES)


def drain(spool: Spool) -> list[tuple[int, bytes]]:
    found = []
    while (waiting := spool.peek()) is not None:
        found.append(waiting)
        spool.pop()
    return found


def append_all(spool: Spool, kept: list[tuple[int, bytes]]) -> None:
    for batch in BATCHES:
        spool.append(*batch)
        kept.append(batch)


def reread(path: Path, content: bytes) -> list[tuple[int, bytes]]:
    path.write_bytes(content)
    with Spool(path, 2**20) as spool:
        return drain(spool)


def test_batches_come_back_in_order_and_an_emptied_spool_leaves_no_file(tmp_path: Path) -> None:
    with Spool(tmp_path / "a.spool", 2**20) as spool:
        for sequence, payload in BATCHES:
            assert spool.append(sequence, payload)
        assert (spool.boot, spool.highest, len(spool)) == ("a", 3, 3)
        assert (tmp_path / "a.spool").read_bytes() == WHOLE
        assert drain(spool) == BATCHES
        assert spool.size_bytes == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.promise("A5")
def test_a_file_torn_at_every_byte_gives_back_every_batch_before_the_tear(tmp_path: Path) -> None:
    ends = [len(b"".join(frame(*batch) for batch in BATCHES[: n + 1])) for n in range(len(BATCHES))]
    for cut in range(len(WHOLE) + 1):
        survivors = sum(end <= cut for end in ends)
        assert reread(tmp_path / "t.spool", WHOLE[:cut]) == BATCHES[:survivors]


@pytest.mark.promise("A5")
def test_after_a_torn_tail_is_cut_new_batches_are_readable(tmp_path: Path) -> None:
    path = tmp_path / "t.spool"
    path.write_bytes(WHOLE[:-3])
    with Spool(path, 2**20) as spool:
        spool.append(9, b"later")
        assert drain(spool) == [*BATCHES[:2], (9, b"later")]


@pytest.mark.promise("A5")
def test_any_changed_byte_costs_one_batch_at_most(
    tmp_path: Path, sizes: Any, record_property: Callable[[str, Any], None]
) -> None:
    cases = sizes("spool_cases", quick=200, long=50_000)
    record_property("cases", cases)

    @settings(max_examples=cases, deadline=None, database=None, derandomize=not sizes.long)
    @given(position=st.integers(0, len(WHOLE) - 1), flip=st.integers(1, 255))
    def case(position: int, flip: int) -> None:
        damaged = bytearray(WHOLE)
        damaged[position] ^= flip
        found = reread(tmp_path / "f.spool", bytes(damaged))
        missing = [batch for batch in BATCHES if batch not in found]
        assert len(missing) <= 1
        assert found == [batch for batch in BATCHES if batch in found]

    case()


@pytest.mark.promise("A5")
def test_any_file_at_all_is_read_without_an_exception(
    tmp_path: Path, sizes: Any, record_property: Callable[[str, Any], None]
) -> None:
    cases = sizes("spool_cases", quick=200, long=50_000)
    record_property("cases", cases)

    @settings(max_examples=cases, deadline=None, database=None, derandomize=not sizes.long)
    @given(junk=st.binary(max_size=300))
    def case(junk: bytes) -> None:
        assert reread(tmp_path / "j.spool", junk + WHOLE)[-3:] == BATCHES

    case()


@pytest.mark.promise("A5")
def test_a_disk_that_fills_at_every_byte_keeps_what_was_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in range(len(WHOLE)):
        path = tmp_path / f"{room}.spool"
        left = [room]

        def write(fd: int, data: bytes, offset: int, left: list[int] = left) -> int:
            if left[0] == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = os.pwrite(fd, bytes(data)[: left[0]], offset)
            left[0] -= written
            return written

        monkeypatch.setattr(spooling, "_pwrite", write)
        kept: list[tuple[int, bytes]] = []
        with Spool(path, 2**20) as spool:
            with pytest.raises(OSError, match="No space left"):
                append_all(spool, kept)
            assert drain(spool) == kept
        assert len(kept) < len(BATCHES)


def test_a_full_spool_says_no_and_takes_words_all_the_same(tmp_path: Path) -> None:
    with Spool(tmp_path / "a.spool", 100) as spool:
        assert spool.append(1, b"x" * 60)
        assert not spool.append(2, b"x" * 60)
        assert spool.append(2, b"x" * 60, force=True)
        assert [sequence for sequence, _ in drain(spool)] == [1, 2]


def test_room_of_sent_batches_is_used_again_without_losing_the_others(tmp_path: Path) -> None:
    with Spool(tmp_path / "a.spool", 1000) as spool:
        sent, sequence = [], 0
        for _ in range(200):
            while spool.append(sequence + 1, bytes(f"{sequence + 1:050d}", "ascii")):
                sequence += 1
            waiting = spool.peek()
            assert waiting is not None
            sent.append(waiting)
            spool.pop()
        sent += drain(spool)
    assert sent == [(n, bytes(f"{n:050d}", "ascii")) for n in range(1, sequence + 1)]


@pytest.mark.promise("A8")
def test_only_spools_of_dead_processes_of_the_same_run_are_taken_up(tmp_path: Path) -> None:
    for run, boot in (("mine", "0001"), ("mine", "0002"), ("other", "0003")):
        with Spool(spool_path(tmp_path, run, boot), 2**20) as dead:
            dead.append(1, boot.encode())
    with Spool(spool_path(tmp_path, "mine", "0004"), 2**20) as living:
        living.append(1, b"mine, alive")
        found, removed = leftovers(tmp_path, "mine", 2**20)
        assert ([s.boot for s in found], removed) == (["0001", "0002"], 0)
        assert [drain(s) for s in found] == [[(1, b"0001")], [(1, b"0002")]]
        for old in found:
            old.close()
    assert leftovers(tmp_path, "mine", 2**20)[0][0].boot == "0004"


STARTS = """
import importlib.util, os, sys
from pathlib import Path
found = importlib.util.spec_from_file_location("spool", sys.argv[4])  # alone: the package would import PyTorch
spool = importlib.util.module_from_spec(found)
found.loader.exec_module(spool)
Spool, leftovers, spool_path = spool.Spool, spool.leftovers, spool.spool_path
folder, name = Path(sys.argv[1]), sys.argv[2]
held, kept = [], []
sys.stdin.readline()
for n in range(int(sys.argv[3])):
    path = spool_path(folder, "mine", f"{n:04}-{name}")
    kept += leftovers(folder, "mine", 2**20)[0]
    held.append(Spool(path, 2**20))
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
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", STARTS, str(tmp_path), str(name), str(spools), str(spooling.__file__)],
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
    path, opened = tmp_path / "late.spool", os.open
    open_once = [True]

    def open_and_lose(name: Any, *rest: Any) -> int:
        fd = opened(name, *rest)
        if Path(name) == path and open_once:
            open_once.clear()
            path.unlink()
        return fd

    monkeypatch.setattr(os, "open", open_and_lose)
    with Spool(path, 2**20) as spool:
        spool.append(7, b"kept")
        with path.open("rb") as file:
            assert file.read() == frame(7, b"kept")


def test_leftovers_are_bounded_and_the_newest_are_kept(tmp_path: Path) -> None:
    for boot in ("0001", "0002", "0003"):
        with Spool(spool_path(tmp_path, "mine", boot), 2**20) as dead:
            dead.append(1, b"x" * 80)
    found, removed = leftovers(tmp_path, "mine", 210)
    assert ([s.boot for s in found], removed) == (["0002", "0003"], 1)
    for old in found:
        old.close()


@pytest.mark.promise("A16")
def test_a_run_name_never_becomes_a_path_and_the_files_are_for_this_user_alone(tmp_path: Path) -> None:
    path = spool_path(tmp_path, "../../etc/run", "0001")
    assert path.resolve().is_relative_to(tmp_path)
    with Spool(path, 2**20) as spool:
        spool.append(1, b"x")
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
