"""Service and agent reject misspelt environment variables, and accept those of other parts and programs."""

import pytest

from foreshock.contract.environment import PREFIX, REMOVED, refuse_misspelt
from foreshock.contract.variables import VARIABLES
from foreshock.monitor import AgentConfig
from foreshock.server.settings import Settings

MISSPELT = {
    "FORESHOCK_RETENTION_SECOND": "FORESHOCK_RETENTION_SECONDS",
    "FORESHOCK_RETENTION": "FORESHOCK_RETENTION_SECONDS",
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
def test_misspelt_variable_is_rejected_with_a_suggestion(
    monkeypatch: pytest.MonkeyPatch, reader: type[Settings] | type[AgentConfig], given: str, meant: str
) -> None:
    monkeypatch.setenv(given, "1")
    with pytest.raises(ValueError, match=f"{given} is not a setting of foreshock; did you mean {meant}"):
        reader()


@pytest.mark.parametrize("reader", [Settings, AgentConfig], ids=["service", "agent"])
@pytest.mark.parametrize("given", [*REMOVED, "foreshock_layers"])
def test_removed_setting_is_rejected_with_an_explanation(
    monkeypatch: pytest.MonkeyPatch, reader: type[Settings] | type[AgentConfig], given: str
) -> None:
    monkeypatch.setenv(given, "7")
    with pytest.raises(ValueError, match=f"{given} is no longer a setting: {REMOVED[given.upper()]}"):
        reader()


def test_empty_variables_are_ignored() -> None:
    refuse_misspelt(dict.fromkeys(REMOVED, ""))


def test_current_settings_are_not_listed_as_removed() -> None:
    assert not {name.removeprefix(PREFIX).lower() for name in REMOVED} & {
        *AgentConfig.model_fields,
        *Settings.model_fields,
    }


@pytest.mark.parametrize("name", VARIABLES)
def test_known_variables_are_accepted(name: str) -> None:
    refuse_misspelt({name: "1"})


def test_kubernetes_service_variables_are_ignored() -> None:
    names = ("SERVICE_HOST", "SERVICE_PORT", "PORT_8765_TCP", "PORT_8765_TCP_ADDR", "SERVICE_PORT_HTTP")
    refuse_misspelt({f"FORESHOCK_{name}": "tcp://10.0.0.1:8765" for name in names})


@pytest.mark.parametrize("name", ["AFTERSHOCK_URL", "FORESIGHT_TOKEN", "FORECAST_RUN", "TOKEN", "URL", "TOKENS_FILE"])
def test_variables_of_other_programs_are_ignored(name: str) -> None:
    refuse_misspelt({name: "1"})
