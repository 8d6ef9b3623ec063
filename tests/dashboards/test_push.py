"""`push` against a stand-in for Grafana that answers as Grafana's documents say, over real HTTP on loopback."""

import json
import re

import pytest
from tests.dashboards.fake_grafana import PROMETHEUS, FakeGrafana

from foreshock.dashboards.boards import boards
from foreshock.dashboards.grafana_client import GrafanaClient, GrafanaError
from foreshock.dashboards.push import push
from foreshock.dashboards.rules import Links


def test_push_makes_folder_data_source_and_boards(grafana: FakeGrafana, client: GrafanaClient) -> None:
    said = list(push(client, Links(), prometheus_url=PROMETHEUS))
    assert said[0] == f"Grafana 13.2.0 at {grafana.url}"
    assert grafana.folders["foreshock"]["title"] == "foreshock"
    assert grafana.datasources["foreshock-prometheus"]["url"] == PROMETHEUS
    assert set(grafana.dashboards) == {board["uid"] for board in boards(Links()).values()}
    assert {board["folderUid"] for board in grafana.dashboards.values()} == {"foreshock"}


def test_push_again_changes_nothing_but_the_version(grafana: FakeGrafana, client: GrafanaClient) -> None:
    list(push(client, Links(), prometheus_url=PROMETHEUS))
    first = json.loads(json.dumps(grafana.dashboards))
    list(push(client, Links(), prometheus_url=PROMETHEUS))
    for uid, board in grafana.dashboards.items():
        assert board == {**first[uid], "version": 2}
    assert len(grafana.folders) == len(grafana.datasources) == 1


def test_push_wins_over_a_board_that_someone_has_changed_since(grafana: FakeGrafana, client: GrafanaClient) -> None:
    list(push(client, Links()))
    grafana.dashboards["foreshock-run"].update(version=41, panels=[])
    list(push(client, Links()))
    assert grafana.dashboards["foreshock-run"]["version"] == 42
    assert grafana.dashboards["foreshock-run"]["panels"]


def test_a_renamed_folder_gets_its_name_back_whatever_its_version(grafana: FakeGrafana, client: GrafanaClient) -> None:
    grafana.folders["foreshock"] = {"uid": "foreshock", "title": "renamed", "version": 7}
    list(push(client, Links()))
    assert grafana.folders["foreshock"] == {"uid": "foreshock", "title": "foreshock", "version": 8}


def test_a_data_source_provisioned_by_file_is_left_alone(grafana: FakeGrafana, client: GrafanaClient) -> None:
    grafana.datasources["foreshock-prometheus"] = {"name": "foreshock", "url": "http://other:9090", "readOnly": True}
    said = list(push(client, Links(), prometheus_url=PROMETHEUS))
    assert "data source foreshock-prometheus is provisioned by file; left as it is" in said
    assert grafana.datasources["foreshock-prometheus"]["url"] == "http://other:9090"


def test_push_never_uses_a_numeric_id(grafana: FakeGrafana, client: GrafanaClient) -> None:
    for _ in range(2):
        list(push(client, Links(), prometheus_url=PROMETHEUS))
    assert not [path for _, path in grafana.calls if re.search(r"/\d+(/|$)|/id/|/name/", path)]
    assert all(board["id"] is None for board in grafana.dashboards.values())


def test_a_board_provisioned_by_file_is_refused_in_grafanas_words(grafana: FakeGrafana, client: GrafanaClient) -> None:
    grafana.dashboards["foreshock-overview"] = {"provisioned": True, "version": 1}
    with pytest.raises(GrafanaError, match="Cannot save provisioned dashboard"):
        list(push(client, Links()))
