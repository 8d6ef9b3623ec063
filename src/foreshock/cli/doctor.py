"""`foreshock doctor`: test what this machine supports."""

import importlib
import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import httpx
from rich.console import Console

from foreshock import __version__
from foreshock.cli.output import print_json, table_of
from foreshock.client import ServiceError, http_client
from foreshock.contract.route import unanswered

State = Literal["ok", "absent", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `absent` means that an optional part is missing; `wrong` makes the command fail."""

    what: str
    state: State
    detail: str


def examine(url: str) -> Iterator[Finding]:
    """Run all checks and yield their findings, the most basic first."""
    yield Finding("foreshock", "ok", f"{__version__} on Python {platform.python_version()}, {platform.machine()}")
    for extra, modules in (
        ("agent", ("torch",)),
        ("server", ("fastapi", "uvicorn", "sqlalchemy", "prometheus_client")),
        ("grafana", ("grafana_api",)),
    ):
        yield _extra(extra, modules)
    if importlib.util.find_spec("torch"):
        yield from _attention()
    for program in ("prometheus", "prometheus-alertmanager"):
        path = shutil.which(program)
        yield Finding(program, "ok" if path else "absent", path or "only needed for alerts and dashboards; not on PATH")
    yield _service(url)


def _extra(extra: str, modules: tuple[str, ...]) -> Finding:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        how = f"pip install '.[{extra}]' in foreshock's clone brings {', '.join(missing)}"
        return Finding(f"extra [{extra}]", "absent", how)
    versions = [f"{module} {importlib.metadata.version(module.replace('_', '-'))}" for module in modules]
    return Finding(f"extra [{extra}]", "ok", ", ".join(versions))


def _attention() -> Iterator[Finding]:
    import torch

    from foreshock.kernels import self_check
    from foreshock.monitor.assessment import costs, pytorchs_choice

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        name = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"
        yield Finding("GPU", "ok", name)
    else:
        yield Finding(
            "GPU",
            "absent",
            "your own attention is measured here; attention='kernels' would run the CPU reference, which is slow",
        )
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        yield _guarded(f"attention on {device}", lambda device=device: self_check.run(device))  # type: ignore[misc]
    own = "cuda" if torch.cuda.is_available() else "cpu"
    yield _guarded("PyTorch's attention", lambda: f"{pytorchs_choice(own)}; {costs(own)}")


def _guarded(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what, "ok", check())
    except Exception as error:
        return Finding(what, "wrong", f"{type(error).__name__}: {error}")


def _service(url: str) -> Finding:
    try:
        with http_client(url, None, 2.0) as client:
            reply = client.get("/healthz")
    except ServiceError as error:
        return Finding("service", "wrong", str(error))
    except httpx.HTTPError as error:
        return Finding("service", "absent", f"none answers at {unanswered(url, error)}; start one: foreshock serve")
    if reply.status_code != httpx.codes.OK:
        return Finding("service", "wrong", f"{url}/healthz answered {reply.status_code}")
    return Finding("service", "ok", f"{url} answers")


def report(url: str, console: Console, *, as_json: bool) -> bool:
    """Print the findings as a table or as JSON; return whether none is `wrong`."""
    findings = list(examine(url))
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        console.print(table_of([asdict(finding) for finding in findings]))
    return all(finding.state != "wrong" for finding in findings)


def report_model(path: str, console: Console) -> None:
    """Print the failures to which the model from `module:factory` is prone, and the layers that attach() would watch.

    If the factory also returns a loss function, as for `foreshock diagnose`, one batch is run.
    Raises ValueError if the path does not name a callable that returns a torch module.
    """
    from torch import nn
    from torch.optim import Optimizer

    from foreshock.lab.diagnosis.own_code import made_by
    from foreshock.monitor import attach
    from foreshock.monitor.assessment import assess

    if not path.partition(":")[2]:
        raise ValueError(f"{path!r} names no factory; write module:factory, such as my_package.model:build")
    made = made_by(path)
    model, *others = made if isinstance(made, tuple) and made else (made,)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{path} is not a callable that returns a torch.nn.Module")
    optimizer = next((each for each in others if isinstance(each, Optimizer)), None)
    loss = next((each for each in others if callable(each) and each is not optimizer), None)
    assessment = assess(model, optimizer, loss)
    if not assessment.found:
        raise ValueError(
            f"no attention was found in {type(model).__name__}; the first step of a training may show some"
        )
    with attach(model, url=None, spool_directory=None, quiet=True) as agent:
        console.print(f"{assessment}\n\n{agent.report()}", markup=False, highlight=False)
