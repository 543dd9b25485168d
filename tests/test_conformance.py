"""The harness that runs JAX's own tests, on a checkout small enough to know the answer."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from conformance import page, reasons
from conformance.__main__ import main
from conformance.runner import FileResult, Outcome
from conformance.selection import select

TESTS = """\
import unittest
import jax
from jax._src.ad_checkpoint import saved_residuals, not_in_any_version

class RematTest(unittest.TestCase):
  def test_gradient(self):
    self.assertAlmostEqual(float(jax.grad(jax.checkpoint(jax.numpy.sin))(0.)), 1.)
    self.assertEqual(len(saved_residuals(jax.checkpoint(jax.numpy.sin), 1.)), 1)

  def test_name_of_primitive(self):
    self.assertIn("remat2", str(jax.make_jaxpr(jax.checkpoint(jax.numpy.sin))(1.)))

  def test_of_another_version(self):
    not_in_any_version(jax.numpy.sin)

class OtherTest(unittest.TestCase):
  def test_through_a_helper(self):
    self.assertEqual(self._gradient(0.), 1.)

  def _gradient(self, x):
    return jax.grad(jax.remat(jax.numpy.sin))(x)

  def test_something_else(self):  # not a test of checkpoint
    raise AssertionError
"""

EXPLAINED = """\
[[reason]]
cases = ["tests/api_test.py::RematTest::test_name_of_primitive", "tests/api_test.py::RematTest::test_gradient"]
inspects = "The name of JAX's primitive."
differs = "Ours has | another name."
noticeable = "no"
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    for name, text in {"jax/version.py": '_version = "9.8.7"\n', "tests/api_test.py": TESTS}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(checkout: Path, folder: Path, explanations: str, *options: str) -> tuple[int, str]:
    """The exit code and the page."""
    (folder / "reasons.toml").write_text(explanations)
    files = ["--out", str(folder / "page.md"), "--reasons", str(folder / "reasons.toml")]
    # Run once for all: the outcomes lie beside the checkout.
    code = main([str(checkout), *files, "--outcomes", str(checkout / "outcomes"), *options])
    written = folder / "page.md"
    return code, written.read_text() if written.exists() else ""


def test_selection_follows_helpers_and_reads_no_comments(checkout: Path) -> None:
    lines = TESTS.splitlines()
    chosen = {lines[n - 1].split("(")[0].split()[-1] for n in select(checkout / "tests/api_test.py").lines}
    assert chosen == {
        "test_gradient",
        "test_name_of_primitive",
        "test_of_another_version",
        "test_through_a_helper",
    }


def test_a_failing_case_needs_an_explanation(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(checkout, tmp_path, "")
    assert code == 1
    assert "failed without an explanation: tests/api_test.py::RematTest::test_name_of_primitive" in (
        capsys.readouterr().out
    )
    assert f"## JAX {jax.__version__}\n\nTests of JAX 9.8.7" in text
    assert "| `api_test.py`, `RematTest` | 2 | 1 | 1 |" in text
    assert "| `api_test.py` | 1 | 1 | 0 |" in text
    assert "Not live, with JAX's functions either: 1 case " in text
    assert "**not explained**" in text
    assert str(tmp_path) not in text


def test_an_explained_failure_is_none_and_a_stale_explanation_is_reported(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(checkout, tmp_path, EXPLAINED)
    assert code == 0
    assert "stale explanation: tests/api_test.py::RematTest::test_gradient passes" in capsys.readouterr().out
    assert "The name of JAX's primitive. | Ours has \\| another name. | no |" in text
    code, text = run(checkout, tmp_path, EXPLAINED.replace('"no"', '"yes"'))
    assert code == 1
    assert "failed, and a user can notice" in capsys.readouterr().out
    assert text.count("## JAX") == 1


def test_sections_of_other_versions_stay(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    for version in ("0.12.0", "0.9.1", "0.10.2", "0.9.1"):
        page.merge(path, version, f"## JAX {version}\n\nrows\n")
    text = path.read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## JAX 0.9.1",
        "## JAX 0.10.2",
        "## JAX 0.12.0",
    ]
    assert text.startswith(page.INTRODUCTION)


def test_a_case_that_does_not_finish_is_a_failed_one() -> None:
    passed = Outcome("passed")
    result = FileResult("f", {"a": passed, "b": passed, "c": Outcome("failed")}, {"a": Outcome("unfinished")})
    assert result.live == ["a", "b"]
    assert set(result.failed) == {"a", "b"}


@pytest.mark.parametrize("missing", ["jax/version.py", "tests/api_test.py", None])
def test_not_a_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str | None) -> None:
    for name in ("jax/version.py", "tests/api_test.py"):
        if name != missing:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("")
    expected = f"is not a checkout of JAX's sources: it has no {missing}" if missing else "has no test file"
    assert main([str(tmp_path)]) == 2
    assert expected in capsys.readouterr().err


def test_bad_explanations(checkout: Path, tmp_path: Path) -> None:
    for text in ("[[reason", EXPLAINED.replace("inspects", "looks_at"), EXPLAINED.replace('"no"', '"maybe"')):
        (tmp_path / "reasons.toml").write_text(text)
        with pytest.raises(reasons.ReasonsError, match=r"reasons\.toml"):
            reasons.load(tmp_path / "reasons.toml")
        assert main([str(checkout), "--reasons", str(tmp_path / "reasons.toml")]) == 2
