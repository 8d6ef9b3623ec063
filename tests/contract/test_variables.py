"""A variable that is misspelt is refused wherever it is read, and never one that another part reads."""

import pytest

from foreshock.contract.environment import PREFIX, REMOVED, refuse_misspelt
from foreshock.contract.variables import VARIABLES
from foreshock.monitor import AgentConfig
from foreshock.server.settings import Settings

MISSPELT = {
    "FORESHOCK_RETENTION_SECOND": "FORESHOCK_RETENTION_SECONDS",
    "FORESHOCK_POLCY": "FORESHOCK_POLICY",
    "FORESHOCK_HOSTS": "FORESHOCK_HOST",
    "FORESHOCK_TOKN": "FORESHOCK_TOKEN",
    "FORESHOCK_SWITCHSCOPE": "FORESHOCK_SWITCH_SCOPE",
    "FORESHOCK_SLACK_URL_FILE": "FORESHOCK_NOTIFY_SLACK_URL_FILE",
    "FORESHOK_TOKENS_FILE": "FORESHOCK_TOKENS_FILE",
    "FORSHOK_URL": "FORESHOCK_URL",
    "FORESCHOCK_RUN": "FORESHOCK_RUN",
    "FORESHOCKTOKEN": "FORESHOCK_TOKEN",
    "FORE_SHOCK_TOKEN": "FORESHOCK_TOKEN",
    "foreshock_token": "FORESHOCK_TOKEN",
    "foreshock_tokenz": "FORESHOCK_TOKEN",
    "Foreshock_Policy": "FORESHOCK_POLICY",
}


@pytest.mark.promise("S18")
@pytest.mark.parametrize("reader", [Settings, AgentConfig], ids=["service", "agent"])
@pytest.mark.parametrize(("given", "meant"), MISSPELT.items())
def test_service_and_agent_refuse_it_and_name_the_nearest(
    monkeypatch: pytest.MonkeyPatch, reader: type[Settings] | type[AgentConfig], given: str, meant: str
) -> None:
    monkeypatch.setenv(given, "1")
    with pytest.raises(ValueError, match=f"{given} is not a setting of foreshock; did you mean {meant}"):
        reader()


@pytest.mark.parametrize("reader", [Settings, AgentConfig], ids=["service", "agent"])
@pytest.mark.parametrize("given", [*REMOVED, "foreshock_layers"])
def test_a_setting_of_an_earlier_build_is_refused_with_what_to_know(
    monkeypatch: pytest.MonkeyPatch, reader: type[Settings] | type[AgentConfig], given: str
) -> None:
    monkeypatch.setenv(given, "7")
    with pytest.raises(ValueError, match=f"{given} is no longer a setting: {REMOVED[given.upper()]}"):
        reader()


def test_an_empty_variable_is_no_setting() -> None:
    refuse_misspelt(dict.fromkeys(REMOVED, ""))


def test_no_setting_of_today_is_called_a_removed_one() -> None:
    assert not {name.removeprefix(PREFIX).lower() for name in REMOVED} & {
        *AgentConfig.model_fields,
        *Settings.model_fields,
    }


@pytest.mark.parametrize("name", VARIABLES)
def test_no_variable_that_is_read_somewhere_is_taken_for_a_misspelt_one(name: str) -> None:
    refuse_misspelt({name: "1"})


def test_what_a_cluster_sets_for_a_service_of_this_name_is_left_alone() -> None:
    names = ("SERVICE_HOST", "SERVICE_PORT", "PORT_8765_TCP", "PORT_8765_TCP_ADDR", "SERVICE_PORT_HTTP")
    refuse_misspelt({f"FORESHOCK_{name}": "tcp://10.0.0.1:8765" for name in names})


@pytest.mark.parametrize("name", ["AFTERSHOCK_URL", "FORESIGHT_TOKEN", "FORECAST_RUN", "TOKEN", "URL", "TOKENS_FILE"])
def test_a_setting_of_another_program_is_left_alone(name: str) -> None:
    refuse_misspelt({name: "1"})
