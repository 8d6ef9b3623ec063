"""`foreshock dashboards`: write boards and alert rules to files, or push boards to Grafana."""

from pathlib import Path
from typing import Annotated

import typer

from foreshock.cli.errors import CommandError, Commands
from foreshock.cli.options import AsJson
from foreshock.cli.output import print_json, print_result
from foreshock.client import DEFAULT_URL

boards = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Grafana boards and alert rules, made from the catalogue."
)


@boards.command("generate")
def dashboards_generate(
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
    grafana_url: Annotated[str | None, typer.Option(help="Address of Grafana, for links in alerts.")] = None,
    service_url: Annotated[str | None, typer.Option(help="Address of the service, for links in boards.")] = None,
    runbooks_url: Annotated[
        str | None, typer.Option(help="Address of the built site's folder runbooks, for links in alerts.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the boards and the alert rules for these addresses; by default for those of docker-compose.yml.

    Configuration files of Prometheus, Alertmanager and Grafana are in dashboards/provisioning of the checkout.
    """
    from foreshock.dashboards.generate import generate
    from foreshock.dashboards.rules import Links

    given = {"grafana": grafana_url, "service": service_url, "runbooks": runbooks_url}
    links = Links(**{name: address for name, address in given.items() if address is not None})
    written = list(map(str, generate(out, links)))
    print_result({"written": written}, "\n".join(written), as_json=as_json)


@boards.command("push")
def dashboards_push(
    grafana_url: Annotated[str, typer.Option(envvar="GRAFANA_URL", help="Address of Grafana.")],
    grafana_token: Annotated[
        str, typer.Option(envvar="GRAFANA_TOKEN", help="Token of a service account with the role Editor.")
    ],
    service_url: Annotated[str, typer.Option(help="Address of the service, as people reach it.")] = DEFAULT_URL,
    prometheus_url: Annotated[
        str | None, typer.Option(help="Also make the data source, for this Prometheus; needs the role Admin.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Load the boards into a running Grafana, through its HTTP API."""
    from foreshock.dashboards.push import GrafanaError, push
    from foreshock.dashboards.rules import Links

    links, lines = Links(grafana=grafana_url, service=service_url), []
    try:
        for line in push(grafana_url, grafana_token, links, prometheus_url=prometheus_url):
            lines.append(line)
            if not as_json:
                typer.echo(line)
    except GrafanaError as error:
        raise CommandError(str(error)) from None
    if as_json:
        print_json({"done": lines})
