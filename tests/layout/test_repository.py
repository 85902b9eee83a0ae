"""What holds for the repository as a whole: who imports whom, what may be named where, and which code is under test."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import mxpool

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "mxpool"
FOLDERS = ("broker", "client", "shm", "workers")
LINES_MAX = 400

# Parts of the package and the parts that each may import. "root" is what lies in src/mxpool itself.
MAY_IMPORT = {
    "root": {"root"},
    "shm": {"root", "shm"},
    "broker": {"root", "shm", "broker"},
    "client": {"root", "shm", "client"},
    "workers": {"root", "shm", "workers"},
    "cli": {"root", "shm", "broker", "client", "workers", "cli"},
}
# Modules without I/O and without a clock: the same calls give the same answers.
PURE = {
    "shm/slots",
    "shm/layout",
    "broker/batching",
    "broker/roster",
    "broker/lifecycle",
    "broker/core",
    "broker/tickets",
    "broker/recovery",
    "broker/admission",
    "broker/outbox",
    "broker/telemetry",
    "client/pending",
    "client/regions",
    "client/arrays",
    "client/results",
    "client/window",
    "client/backoff",
    "workers/backends/onnx_signature",
    "workers/backends/replay_check",
}
IO_MODULES = {"socket", "zmq", "time", "os", "select", "selectors", "subprocess", "threading", "asyncio", "random",
              "signal", "shutil", "tempfile", "pathlib", "posix_ipc"}  # fmt: skip
RUNTIMES = {"onnxruntime", "tensorrt", "cuda", "torch"}
UNPICKLERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "recv_pyobj", "send_pyobj"}


def modules() -> dict[str, Path]:
    """Every module of the package, as ``part/name`` (``root/wire``), with the real file behind it."""
    found = {f"root/{path.stem}": path for path in PACKAGE.glob("*.py")}
    for folder in (*FOLDERS, "cli"):
        top = ROOT / folder if folder in FOLDERS else PACKAGE / folder
        found |= {f"{folder}/{path.relative_to(top).with_suffix('')}": path for path in top.rglob("*.py")}
    return found


MODULES = modules()
TESTS = {str(path.relative_to(ROOT)): path for path in (ROOT / "tests").rglob("*.py")}


def imported(path: Path) -> Iterator[str]:
    """Full names of what ``path`` imports anywhere in it, except where only a type checker looks."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(name: str) -> str | None:
    """The part of the package that ``name`` belongs to; None outside of it."""
    words = name.split(".")
    if words[0] != "mxpool":
        return None
    return words[1] if len(words) > 1 and words[1] in MAY_IMPORT else "root"


def test_there_is_something_to_look_at() -> None:
    assert {name.split("/")[0] for name in MODULES} == set(MAY_IMPORT)
    assert set(MODULES) >= PURE


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_from_the_parts_below_it(module: str) -> None:
    own = module.split("/", maxsplit=1)[0]
    for name in imported(MODULES[module]):
        other = part(name)
        if module == "root/__init__" and name == "mxpool.client.blocking.Client":
            continue  # the package's one public name, imported when it is first asked for
        assert other is None or other in MAY_IMPORT[own], f"{module} imports {name}"


@pytest.mark.parametrize("module", sorted(PURE))
def test_a_pure_module_imports_nothing_that_does_io_or_tells_the_time(module: str) -> None:
    roots = {name.split(".")[0] for name in imported(MODULES[module])}
    assert not roots & IO_MODULES
    assert "mxpool.clock.now_us" not in set(imported(MODULES[module]))


@pytest.mark.parametrize("module", sorted(name for name in MODULES if not name.startswith("workers/")))
def test_only_workers_import_a_runtime(module: str) -> None:
    assert not {name.split(".")[0] for name in imported(MODULES[module])} & RUNTIMES


def words(path: Path) -> Iterator[str]:
    """Every name and attribute that the code of ``path`` uses, and what it imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
            yield ast.unparse(node)
    yield from (name.split(".")[0] for name in imported(path))


def keywords(path: Path) -> Iterator[tuple[str, str]]:
    """Every keyword argument and its value."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg:
            yield node.arg, ast.unparse(node.value)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_nothing_is_unpickled_anywhere(module: str) -> None:
    assert not set(words(MODULES[module])) & UNPICKLERS
    assert all(value == "False" for name, value in keywords(MODULES[module]) if name == "allow_pickle")
    numpy_loads = [word for word in words(MODULES[module]) if word in ("np.load", "numpy.load")]
    assert len(numpy_loads) <= sum(name == "allow_pickle" for name, _ in keywords(MODULES[module]))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_fits_in_one_reading(module: str) -> None:
    assert len(MODULES[module].read_text(encoding="utf-8").splitlines()) <= LINES_MAX


@pytest.mark.parametrize("module", sorted(name for name in MODULES if not name.startswith("cli/")))
def test_only_the_command_line_looks_into_the_environment(module: str) -> None:
    # A client finds its broker as the programs do; a child process gets the environment as it is, and more.
    if module not in {"client/blocking", "broker/worker_process", "workers/probe"}:
        assert not set(words(MODULES[module])) & {"os.environ", "os.getenv"}


@pytest.mark.parametrize("test", sorted(TESTS))
def test_tests_neither_sleep_nor_mock(test: str) -> None:
    used = set(words(TESTS[test])) | set(imported(TESTS[test]))
    assert not used & {"time.sleep", "asyncio.sleep", "MagicMock", "Mock", "mocker"}
    assert not any(name.startswith("unittest") for name in imported(TESTS[test]))


def test_test_modules_have_names_of_their_own() -> None:
    # A stand-in is named as what it stands in for, and pytest wants just that name for conftest.py.
    own = (Path(test) for test in TESTS if not test.startswith("tests/standins/"))
    names = [test.name for test in own if test.name != "conftest.py"]
    assert len(names) == len(set(names))
    assert "__init__.py" not in names


def test_the_code_under_test_is_this_checkout() -> None:
    assert mxpool.__file__ is not None
    assert Path(mxpool.__file__).resolve() == PACKAGE / "__init__.py"


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_real_folders_lie_at_the_top_and_the_package_links_to_them_relatively(folder: str) -> None:
    link = PACKAGE / folder
    assert link.is_symlink()
    assert str(link.readlink()) == f"../../{folder}"
    assert link.resolve() == ROOT / folder


def test_no_other_link_leaves_the_repository_or_is_absolute() -> None:
    ignored = {".git", ".venv", ".venv310", "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache", "shared"}
    for top, folders, files in os.walk(ROOT):
        folders[:] = [folder for folder in folders if folder not in ignored]
        for path in (Path(top) / name for name in (*folders, *files)):
            if path.is_symlink():
                assert not path.readlink().is_absolute(), path
                assert path.resolve().is_relative_to(ROOT), path


def test_the_top_of_the_repository_is_not_importable() -> None:
    import importlib.util  # noqa: PLC0415

    for folder in FOLDERS:
        found = importlib.util.find_spec(folder)
        assert found is None or not str(found.origin).startswith(str(ROOT)), folder
