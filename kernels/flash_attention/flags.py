"""Flags of modes."""

from typing import Final

from foreshock.contract.slots import Mode

STABLE_SOFTMAX: Final = int(Mode.STABLE_SOFTMAX)
PAPER_SOFTMAX: Final = int(Mode.PAPER_SOFTMAX)
ROW_CORRECTED: Final = 8
CENTRED_KEYS: Final = 16
CENTRED_VALUES: Final = 32
