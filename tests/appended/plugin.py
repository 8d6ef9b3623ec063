"""A plugin, `pytest -p tests.appended.plugin`: slots appended to the contract before anything imports it.

They are written where a person would write them, and are of every kind: floats after counts, a count after floats.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import foreshock.contract

SLOTS = """    MASS_SUM = 23
    LOOKED_AT_ROWS = 24
    DEPTH_MAX = 25
"""
INFO = """    Slot.MASS_SUM: SlotInfo("float64", "sum", 0, "A sum."),
    Slot.LOOKED_AT_ROWS: SlotInfo("int64", "sum", 0, "A count."),
    Slot.DEPTH_MAX: SlotInfo("float64", "max", -np.inf, "A maximum."),
"""


def _install() -> None:
    name = "foreshock.contract.slots"
    assert name not in sys.modules, "the contract was imported before its slots were appended"
    found = find_spec(name)
    assert found is not None
    assert found.origin is not None
    text = Path(found.origin).read_text("utf-8")
    last = "    GRADIENT_ERROR_MAX = 22\n"
    described = "the inputs are finite and the model's attention output is not.\"\n    ),\n"
    assert text.count(last) == text.count(described) == 1, "the last slot is another by now: append after that"
    module = ModuleType(name)
    module.__file__ = found.origin
    sys.modules[name] = module
    more = text.replace(last, last + SLOTS).replace(described, described + INFO)
    exec(compile(more, found.origin, "exec"), module.__dict__)
    vars(foreshock.contract)["slots"] = module


_install()
