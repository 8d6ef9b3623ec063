"""A plugin, `pytest -p tests.appended.plugin`: slots appended to the contract before anything imports it.

They are written where a person would write them, and are of every kind: floats after counts, a count after floats.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import foreshock.contract

SLOTS = """    MASS_SUM = 24
    LOOKED_AT_ROWS = 25
    DEPTH_MAX = 26
"""


def _install() -> None:
    name = "foreshock.contract.slots"
    assert name not in sys.modules, "the contract was imported before its slots were appended"
    found = find_spec(name)
    assert found is not None
    assert found.origin is not None
    text = Path(found.origin).read_text("utf-8")
    last = "    MOST_ENTROPY_SUM = 23\n"
    sums, maxima = "    Slot.MOST_ENTROPY_SUM,\n)", "Slot.GRADIENT_ERROR_MAX)"
    places = {
        last: last + SLOTS,
        sums: sums.replace(")", "    Slot.MASS_SUM,\n)"),
        maxima: maxima.replace(")", ", Slot.DEPTH_MAX)"),
    }
    assert all(text.count(place) == 1 for place in places), "the last slots are others by now: append after them"
    module = ModuleType(name)
    module.__file__ = found.origin
    sys.modules[name] = module
    for place, appended in places.items():
        text = text.replace(place, appended)
    exec(compile(text, found.origin, "exec"), module.__dict__)
    vars(foreshock.contract)["slots"] = module


_install()
