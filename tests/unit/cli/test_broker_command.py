from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mxpool.cli.broker import Start, app
from mxpool.config import Config
from mxpool.errors import EndpointInUse

FILE = '[models.ranking]\npath = "ranking.onnx"\n'


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """The command sets up the root logger; the next test gets back what was there."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


class Broker:
    """Remembers what it is to serve, and ends as told."""

    def __init__(self, exit_code: int = 0, error: Exception | None = None) -> None:
        self.configs: list[Config] = []
        self.exit_code = exit_code
        self.error = error

    def serve(self, config: Config) -> int:
        self.configs.append(config)
        logging.getLogger("mxpool.test").debug("serving")
        if self.error is not None:
            raise self.error
        return self.exit_code

    def run(self, *args: object) -> tuple[int, str]:
        start = Start(environ={"XDG_RUNTIME_DIR": "/run/user/0"}, serve=self.serve)
        result = CliRunner().invoke(app, [str(arg) for arg in args], obj=start, catch_exceptions=False)
        return result.exit_code, result.stderr


def test_a_config_file_is_served_under_the_flags(tmp_path: Path) -> None:
    (tmp_path / "mx.toml").write_text(FILE)
    broker = Broker()
    assert broker.run(tmp_path / "mx.toml", "-e", "ipc:///run/a.sock")[0] == 0
    assert broker.configs[0].broker.endpoints == ("ipc:///run/a.sock",)
    assert broker.configs[0].models["ranking"].path == str(tmp_path / "ranking.onnx")


def test_models_are_served_without_a_file() -> None:
    broker = Broker()
    flags = ("--model", "a=/srv/a.onnx", "--model", "b=/srv/b.onnx", "--max-batch-size", 4, "--dims", "b:x=3x8")
    assert broker.run(*flags)[0] == 0
    assert {name: model.dims for name, model in broker.configs[0].models.items()} == {"a": {}, "b": {"x": (3, 8)}}


def test_the_brokers_own_exit_code_is_the_programs(tmp_path: Path) -> None:
    (tmp_path / "mx.toml").write_text(FILE)
    assert Broker(exit_code=1).run(tmp_path / "mx.toml")[0] == 1


def test_a_bad_file_exits_with_2_and_its_lines_and_nothing_is_served(tmp_path: Path) -> None:
    (tmp_path / "mx.toml").write_text(FILE + 'threads = 0\npad = "x"\n')
    broker = Broker()
    exit_code, stderr = broker.run(tmp_path / "mx.toml")
    assert (exit_code, broker.configs) == (2, [])
    assert stderr.count(f"{tmp_path / 'mx.toml'}: models.ranking.") == 2
    assert "Traceback" not in stderr


@pytest.mark.parametrize("flags", [(), ("mx.toml", "--model", "a=a.onnx"), ("mx.toml", "--max-batch-size", "4")])
def test_a_call_that_is_neither_a_file_nor_models_exits_with_2(flags: tuple[str, ...]) -> None:
    broker = Broker()
    assert (broker.run(*flags)[0], broker.configs) == (2, [])


def test_an_error_of_the_broker_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "mx.toml").write_text(FILE)
    error = EndpointInUse(path="/run/a.sock", reason="another broker holds it")
    assert Broker(error=error).run(tmp_path / "mx.toml") == (
        1,
        "endpoint_in_use: /run/a.sock: another broker holds it\n",
    )


@pytest.mark.parametrize(("level", "lines"), [("debug", 1), ("info", 0)])
def test_the_log_level_is_that_of_the_flag(tmp_path: Path, level: str, lines: int) -> None:
    (tmp_path / "mx.toml").write_text(FILE)
    stderr = Broker().run(tmp_path / "mx.toml", "--log-level", level)[1]
    assert stderr.count("level=debug logger=mxpool.test") == lines
