"""Modes that the host knows: those noted last, until the tensor is written without a note."""

import torch

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention.known_modes import known_modes, note_modes

UNKNOWN = (False, True, True)
"""known_modes() of unknown modes: all are corrected, some may be corrected, some may be shifted."""


def test_unnoted_modes_are_unknown_and_missing_modes_are_plain() -> None:
    assert known_modes(torch.zeros(2, dtype=torch.int32)) == UNKNOWN
    assert known_modes(None) == (False, False, False)


def test_last_noted_flags_are_known() -> None:
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


def test_unnoted_write_makes_the_modes_unknown() -> None:
    modes = torch.zeros(3, dtype=torch.int32)
    note_modes(modes, [0, 0, 0])
    modes[1] = int(Mode.ROW_CORRECTED)
    assert known_modes(modes) == UNKNOWN
    note_modes(modes, modes.tolist())
    assert known_modes(modes) == (False, True, False)


def test_modes_are_known_for_equal_views_while_the_noted_tensor_is_alive() -> None:
    memory = torch.zeros(6, dtype=torch.int32)
    modes = memory[2:5].data
    note_modes(modes, [8, 8, 8])
    same, shorter, other = memory[2:5], memory[2:4], memory[3:]
    assert known_modes(same) == known_modes(modes) == (True, True, False)
    assert known_modes(shorter) == known_modes(other) == UNKNOWN
    note_modes(same, [0, 0, 0])
    del modes
    assert known_modes(same) == (False, False, False)
    del same
    assert known_modes(memory[2:5]) == UNKNOWN


def test_write_to_or_deletion_of_the_named_tensor_makes_the_modes_unknown() -> None:
    memory = torch.zeros(6, dtype=torch.int32)
    modes = memory[2:5].data  # has a separate version counter
    note_modes(modes, [0, 0, 0], written=memory)
    assert known_modes(modes) == (False, False, False)
    memory[3] = int(Mode.ROW_CORRECTED)
    assert known_modes(modes) == UNKNOWN
    note_modes(modes, [0, 8, 0], written=memory)
    assert known_modes(modes) == (False, True, False)
    del memory
    assert known_modes(modes) == UNKNOWN
