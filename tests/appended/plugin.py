"""A pytest plugin (`-p tests.appended.plugin`) that appends slots to the contract before anything imports it.

It adds a slot of every kind at the place where a developer would add it: floats after counts, and a count after floats.
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
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text("utf-8")
    last = "    MOST_ENTROPY_SUM = 23\n"
    sums, maxima = "    Slot.MOST_ENTROPY_SUM,\n)", "Slot.GRADIENT_ERROR_MAX)"
    insertions = {
        last: last + SLOTS,
        sums: sums.replace(")", "    Slot.MASS_SUM,\n)"),
        maxima: maxima.replace(")", ", Slot.DEPTH_MAX)"),
    }
    assert all(text.count(place) == 1 for place in insertions), (
        "the contract has new last slots: update this plugin to append after them"
    )
    module = ModuleType(name)
    module.__file__ = spec.origin
    sys.modules[name] = module
    for place, appended in insertions.items():
        text = text.replace(place, appended)
    exec(compile(text, spec.origin, "exec"), module.__dict__)
    vars(foreshock.contract)["slots"] = module


_install()
