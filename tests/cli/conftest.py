"""Files to point the command line at, and how to call it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoremat.cli import main
from support.cli import MODEL, Call, Result


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run `autoremat` with these arguments."""

    def run(*argv: object) -> Result:
        code = main([str(a) for a in argv])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An input file puts its folder on the path: not for the next test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [n for n in sys.modules if n.startswith("_autoremat_input_")]:
        del sys.modules[name]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file with a function whose activations are its bulk, and which compiles in no time."""
    path = tmp_path / "model.py"
    path.write_text(MODEL, "utf-8")
    return path
