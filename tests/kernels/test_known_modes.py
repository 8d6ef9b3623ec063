"""What the host knows of modes: what was noted, until they are written otherwise."""

import torch

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention.known_modes import known_modes, note_modes

NOTHING = (False, True, True)
"""All corrected, some corrected, some shifted."""


def test_of_modes_that_nobody_noted_anything_may_be_true_and_without_modes_nothing() -> None:
    assert known_modes(torch.zeros(2, dtype=torch.int32)) == NOTHING
    assert known_modes(None) == (False, False, False)


def test_the_flags_that_were_noted_last_are_known() -> None:
    modes = torch.zeros(3, dtype=torch.int32)
    for flags, known in (
        ((0, 1, 0), (False, False, False)),
        ((0, 8, 0), (False, True, False)),
        ((9, 8, 12), (True, True, True)),
        ((4, 0, 0), (False, False, True)),
        ((0, 0, 0), (False, False, False)),
    ):
        note_modes(modes, map(Mode, flags))
        assert known_modes(modes) == known


def test_a_write_that_nobody_noted_ends_the_knowledge() -> None:
    modes = torch.zeros(3, dtype=torch.int32)
    note_modes(modes, [0, 0, 0])
    modes[1] = int(Mode.ROW_CORRECTED)
    assert known_modes(modes) == NOTHING
    note_modes(modes, modes.tolist())
    assert known_modes(modes) == (False, True, False)


def test_it_is_known_of_what_shares_the_memory_while_the_noted_tensor_is_alive() -> None:
    memory = torch.zeros(6, dtype=torch.int32)
    modes = memory[2:5].data
    note_modes(modes, [8, 8, 8])
    same, shorter, other = memory[2:5], memory[2:4], memory[3:]
    assert known_modes(same) == known_modes(modes) == (True, True, False)
    assert known_modes(shorter) == known_modes(other) == NOTHING
    note_modes(same, [0, 0, 0])
    del modes
    assert known_modes(same) == (False, False, False)
    del same
    assert known_modes(memory[2:5]) == NOTHING


def test_a_write_through_the_tensor_that_is_named_ends_the_knowledge_and_so_does_its_end() -> None:
    memory = torch.zeros(6, dtype=torch.int32)
    modes = memory[2:5].data  # has a version of its own
    note_modes(modes, [0, 0, 0], written=memory)
    assert known_modes(modes) == (False, False, False)
    memory[3] = int(Mode.ROW_CORRECTED)
    assert known_modes(modes) == NOTHING
    note_modes(modes, [0, 8, 0], written=memory)
    assert known_modes(modes) == (False, True, False)
    del memory
    assert known_modes(modes) == NOTHING
