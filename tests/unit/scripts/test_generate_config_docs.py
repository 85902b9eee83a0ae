from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mxpool import config, faults, switches

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "generate_config_docs.py"))


def test_the_page_in_the_repository_is_the_one_that_the_config_generates(script: dict[str, Any]) -> None:
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == script["page"](), (
        "run scripts/generate_config_docs"
    )


def test_the_script_runs_from_a_shell_without_the_virtual_environment() -> None:
    command = [str(ROOT / "scripts" / "generate_config_docs"), "--check"]
    ran = subprocess.run(
        command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_every_switch_is_a_row_of_three_cells(script: dict[str, Any]) -> None:
    rows = list(script["switch_rows"]())
    assert [row.count("|") for row in rows] == [4] * 5
    assert [row.split("|")[1].strip() for row in rows[2:]] == [
        f"`{name}`" for name in (switches.GRAPH, switches.SHARED_QUEUE, switches.FIXED_INPUTS)
    ]


def test_the_example_of_the_page_is_a_config_of_this_release(script: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "mx.toml"
    path.write_text(script["page"]().split("```toml\n")[1].split("```")[0])
    assert config.read(path).models["ranking"].worker_count == 2


def test_every_key_of_every_table_is_a_row(script: dict[str, Any]) -> None:
    page = script["page"]()
    for model in (config.BrokerConfig, config.DeviceConfig, config.ModelConfig):
        assert all(f"\n| `{key}` | " in page for key in faults.keyed_fields(model))


@pytest.mark.parametrize(
    ("key", "kind", "default"),
    [
        ("path", "string", "required"),
        ("max_batch_size", "integer", "`128`"),
        ("fixed_input_buffers", "boolean", "`true`"),
        ("workers", "table", "`{ cpu = 1 }`"),
        ("batch_sizes", "array", "powers of two"),
        ("dims", "table", "`{}`"),
        ("graph", "string", '`"prefer"`'),
        ("slots", "integer", "2 x max(workers, 2) + 2"),
        ("backend", "string", "by the suffix"),
    ],
)
def test_types_and_defaults_are_written_as_in_toml(script: dict[str, Any], key: str, kind: str, default: str) -> None:
    field = faults.keyed_fields(config.ModelConfig)[key]
    assert (script["type_words"](field.annotation), script["default_words"](field)) == (kind, default)
