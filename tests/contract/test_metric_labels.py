import re
from pathlib import Path

import foreshock.monitor.config
from foreshock.contract.metrics.metric import DROP_REASONS, FAULT_COMPONENTS, OTHER, SIGNALS, known
from foreshock.monitor.detect.growth import SIGNAL_NAMES

MONITOR = Path(foreshock.monitor.config.__file__ or "").parent


def written(pattern: str) -> set[str]:
    """What stands in the agent's sources where the pattern's group is."""
    return {found for path in MONITOR.rglob("*.py") for found in re.findall(pattern, path.read_text("utf-8"))}


def test_every_word_that_the_agent_says_is_a_label() -> None:
    reasons = written(r'dropped\["([a-z_]+)"')
    assert {"queue_full", "spool_lost", "unbuilt"} <= reasons <= set(DROP_REASONS)
    components = (
        written(r'faults\["([a-z_]+)"') | written(r'Guard\("([a-z_]+)"') | written(r'self\._guards\["([a-z_]+)"')
    )
    assert {"agent", "detectors", "spool", "probe"} <= components <= set(FAULT_COMPONENTS)
    assert set(SIGNAL_NAMES) < set(SIGNALS)


def test_what_is_not_known_is_other() -> None:
    assert (known("score", SIGNALS), known("score ", SIGNALS), known("", SIGNALS)) == ("score", OTHER, OTHER)
