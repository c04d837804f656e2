"""A copy of the program in a temporary folder, for tests of the command line.

No test sees the user's keys, `.env`, sessions or skills.
"""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from program import Done, Program, bare_environment

SOURCE = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fresh copy; nothing may stay changed in it."""
    copy = tmp_path_factory.mktemp("project")
    shutil.copy(SOURCE / "agent.py", copy)
    for name in ("prompts", "skills"):
        shutil.copytree(SOURCE / name, copy / name)
    return copy


@pytest.fixture
def program(project: Path, tmp_path: Path) -> Program:
    """The copy, to be started in an empty folder `work` with an empty home."""
    for name in ("work", "home"):
        (tmp_path / name).mkdir()
    return Program(project, tmp_path / "work", bare_environment(tmp_path / "home"))


@pytest.fixture(scope="session")
def module(project: Path) -> ModuleType:
    """agent.py of the copy as a module."""
    spec = importlib.util.spec_from_file_location("agent_copy", project / "agent.py")
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["agent_copy"] = loaded
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def dotenv(project: Path) -> Iterator[Callable[[str | bytes], None]]:
    """Writes the copy's .env; it is gone after the test."""
    path = project / ".env"
    yield lambda text: void(path.write_bytes(text.encode() if isinstance(text, str) else text))
    path.unlink(missing_ok=True)


def void(_: object) -> None:
    """For a lambda that is called for what it does."""


@pytest.fixture
def call(
    module: ModuleType,
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Done]:
    """`call(*args, stdin="", **env)` runs main() in this process, which spares its start."""
    for name in list(os.environ):
        if not name.startswith(("PYTEST_", "COV_")):
            monkeypatch.delenv(name)
    for name, value in program.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(program.folder)

    def run(*args: str, stdin: str = "", **env: str) -> Done:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
            for name, value in env.items():
                patch.setenv(name, value)
            code = module.main(list(args))
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return run
