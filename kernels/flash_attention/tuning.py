"""Block sizes by device, head dim and pass: a static table, so that nothing is tried out while a model trains."""

from typing import Final, NamedTuple


class Config(NamedTuple):
    """How one kernel is cut: queries and keys a tile, warps a program, depth of the pipeline, Hopper's copy engine."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool


class Configs(NamedTuple):
    """The configurations of one device and head dim."""

    forward: Config
    grad_query: Config
    grad_key: Config


_HOPPER: Final = {
    64: Configs(Config(128, 128, 8, 3, True), Config(128, 64, 8, 3, True), Config(128, 64, 8, 3, True)),
    128: Configs(Config(128, 128, 8, 2, True), Config(128, 64, 8, 2, True), Config(64, 128, 8, 2, True)),
    256: Configs(Config(128, 64, 8, 2, True), Config(64, 64, 8, 2, True), Config(64, 64, 8, 2, True)),
}
_ELSEWHERE: Final = {
    64: Configs(Config(128, 64, 4, 3, False), Config(64, 64, 4, 3, False), Config(64, 64, 4, 3, False)),
    128: Configs(Config(128, 64, 8, 2, False), Config(64, 64, 8, 2, False), Config(64, 64, 8, 2, False)),
    256: Configs(Config(64, 32, 8, 1, False), Config(32, 32, 8, 1, False), Config(32, 32, 8, 1, False)),
}
_INTERPRETER: Final = Configs(Config(32, 32, 4, 1, False), Config(32, 16, 4, 1, False), Config(16, 32, 4, 1, False))


def configs(capability: int, block_d: int) -> Configs:
    """The configurations for a compute capability (times ten, 0 for the interpreter) and a tile's head dim."""
    if capability == 0:
        return _INTERPRETER
    return (_HOPPER if capability == 90 else _ELSEWHERE)[max(64, block_d)]
