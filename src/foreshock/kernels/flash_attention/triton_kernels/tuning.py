"""Block sizes by device, head dim and pass: a static table, so that training never pauses for autotuning."""

from typing import Final, NamedTuple


class Config(NamedTuple):
    """Tiling of one kernel: queries and keys per tile, warps per program, pipeline stages, Hopper's copy engine."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool
    registers: int | None = None
    """Limit of registers per thread, so that one more program fits a multiprocessor."""
    operands_in_registers: bool = False
    """Forward and dQ: keep the block of queries in registers, which frees shared memory and its bandwidth."""

    def fitted(self, tma: bool) -> "Config":
        """Return this configuration, without Hopper's copy engine unless `tma`: it cannot read all tensors."""
        return self if tma or not self.tma else self._replace(tma=False)

    @property
    def options(self) -> dict[str, int | None]:
        """Launch options in Triton's terms."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


class Configs(NamedTuple):
    """The configurations of one device and head dim."""

    forward: Config
    grad_query: Config
    grad_key: Config
    corrected: Config | None = None
    """dQ if the rows of every head are known to be corrected; None: use grad_query."""


_HOPPER: Final = {
    64: Configs(
        Config(64, 128, 4, 2, True),
        Config(64, 64, 4, 3, True, registers=168),
        Config(64, 64, 4, 3, True),
        Config(64, 32, 4, 3, True, registers=128),
    ),
    128: Configs(
        Config(64, 64, 4, 3, True, operands_in_registers=True),
        Config(64, 64, 4, 3, True, operands_in_registers=True),
        Config(64, 64, 4, 2, True),
        Config(128, 64, 8, 3, True),
    ),
    256: Configs(
        Config(128, 32, 8, 2, True),  # 64 keys would fit too (192 KiB), but were not timed
        Config(64, 64, 8, 2, True),
        Config(32, 64, 8, 2, True),
    ),
}
_HOPPER_SHORT: Final = {
    64: Configs(
        Config(64, 128, 4, 2, True),
        Config(64, 64, 4, 3, True, registers=168),
        Config(64, 64, 4, 3, True, registers=168),
        Config(64, 32, 4, 3, True, registers=128),
    ),
    128: _HOPPER[128]._replace(corrected=None),
}
"""If a row sees at most 1024 keys on average: more programs per multiprocessor balance the load at the end."""
_ELSEWHERE: Final = {
    64: Configs(Config(128, 64, 4, 3, False), Config(64, 64, 4, 3, False), Config(64, 64, 4, 3, False)),
    128: Configs(Config(128, 64, 8, 2, False), Config(64, 64, 8, 2, False), Config(64, 64, 8, 2, False)),
    256: Configs(Config(64, 32, 8, 1, False), Config(32, 32, 8, 1, False), Config(32, 32, 8, 1, False)),
}
_INTERPRETER: Final = Configs(Config(32, 32, 4, 1, False), Config(32, 32, 4, 1, False), Config(16, 32, 4, 1, False))


def configs(capability: int, block_d: int, keys: int) -> Configs:
    """Return the configurations for a compute capability (times ten, 0 for the interpreter), a tile's head dim, and the
    number of keys that a row sees on average."""
    if capability == 0:
        return _INTERPRETER
    block_d = max(64, block_d)
    if capability != 90:
        return _ELSEWHERE[block_d]
    return _HOPPER_SHORT[block_d] if keys <= 1024 and block_d in _HOPPER_SHORT else _HOPPER[block_d]
