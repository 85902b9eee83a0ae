from __future__ import annotations

from pathlib import Path

import pytest
from fake_client import ENDPOINT, FakeClient, mxpool
from typer.testing import CliRunner

from mxpool.cli.main import app
from mxpool.cli.surroundings import Surroundings

COMMANDS = ("check", "status", "models", "infer", "push", "bench", "verify", "slots", "drain")
PAGE = Path(__file__).parents[3] / "docs" / "cli.md"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_there_has_json_and_is_on_the_page(command: str) -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    assert "--json" in shown.output
    assert f"mxpool {command}" in PAGE.read_text()


def test_the_client_gets_the_endpoint_of_the_flag() -> None:
    client = FakeClient()
    mxpool(client, "models")
    assert (client.endpoints, client.closed) == ([ENDPOINT], 1)


def test_the_client_gets_the_endpoint_of_the_environment_where_there_is_no_flag() -> None:
    client = FakeClient()
    around = Surroundings(connect=client.connect, environ={"MX_BROKER_ENDPOINT": "ipc:///run/env.sock"})
    CliRunner().invoke(app, ["models"], obj=around, catch_exceptions=False)
    assert client.endpoints == ["ipc:///run/env.sock"]


def test_an_endpoint_that_is_none_exits_with_2() -> None:
    client = FakeClient()
    around = Surroundings(connect=client.connect, environ={})
    ran = CliRunner().invoke(app, ["-e", "nowhere", "models"], obj=around, catch_exceptions=False)
    assert (ran.exit_code, client.endpoints) == (2, [])
    assert ran.stderr.startswith("config_invalid: ")
