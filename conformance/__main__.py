"""Run JAX's own tests of rematerialization with autoremat in place of JAX's functions, and write a page of results.

PATH is a checkout of JAX's sources. Its version should be that of the installed JAX; where the tests are older or newer, what
they import and the installed JAX lacks is replaced by a dummy, and the cases that use it are not live. Each test file runs twice in
a process of its own, with JAX's functions and with ours, on the CPU as eight devices.

exit codes:
  0   every live case passes, or fails with an explanation that says that no user can notice, or that the difference is documented
  1   a live case fails without an explanation in conformance/reasons.toml, or in a way that a user can notice
  2   nothing was run: PATH is no checkout of JAX, an option or the file of explanations is wrong, no case is live

An explanation for a case that passes is reported as stale.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from conformance import page
from conformance.reasons import FILE, ReasonsError, load
from conformance.runner import FileResult, run_file
from conformance.selection import checkout_version, test_files

PAGE = Path(__file__).parents[1] / "docs" / "conformance.md"


class InputError(ValueError):
    """The caller asked for something that cannot be done; the text says what."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="a checkout of JAX's sources")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=PAGE, help="the page (default: docs/conformance.md)"
    )
    parser.add_argument("--reasons", metavar="FILE", type=Path, default=FILE, help="the explanations (TOML)")
    parser.add_argument(
        "--sources",
        metavar="TEXT",
        help="what the page calls the tests (default: 'JAX' and the checkout's version)",
    )
    parser.add_argument(
        "--only",
        metavar="GLOB",
        help="only test files whose path in the checkout matches; the page is left alone",
    )
    parser.add_argument(
        "--outcomes",
        metavar="FOLDER",
        type=Path,
        help="keep outcomes and logs in this folder, and do not run again what it holds",
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=1800, help="for one test file (default: 1800)"
    )
    return parser


def _files(checkout: Path, only: str | None) -> list[str]:
    """The test files to run."""
    for required in ("jax/version.py", "tests/api_test.py"):
        if not (checkout / required).is_file():
            raise InputError(f"{checkout} is not a checkout of JAX's sources: it has no {required}.")
    found = test_files(checkout)
    chosen = [name for name in found if only is None or fnmatch.fnmatch(name, only)]
    if not chosen:
        what = f" whose path matches {only}" if only else ""
        raise InputError(f"{checkout} has no test file{what} that touches rematerialization; it has {found}.")
    return chosen


def _run(checkout: Path, names: Sequence[str], folder: Path, timeout: float) -> list[FileResult]:
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    for name in names:
        result = run_file(checkout, name, folder, timeout)
        results.append(result)
        why = f"; not importable: {result.import_error}" if result.import_error else ""
        print(f"{name}: {len(result.live)} live, {len(result.failed)} failed{why}", flush=True)
    return results


def _say(report: page.Report) -> None:
    live, failed = len(report.live), len(report.failing)
    print(
        f"JAX {report.version}, tests of {report.sources}: {live} live, {live - failed} passed, {failed} failed"
    )
    for case, text in report.unexplained.items():
        print(f"failed without an explanation: {case}: {text.splitlines()[0][:200]}")
    for case in report.noticeable:
        print(f"failed, and a user can notice: {case}")
    for case in report.stale:
        print(f"stale explanation: {case} passes")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = _parser().parse_args(arguments)
    checkout: Path = options.path.resolve()
    try:
        names = _files(checkout, options.only)
        reasons = load(options.reasons)
        sources = options.sources or f"JAX {checkout_version(checkout)}"
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.outcomes or Path(temporary)).resolve()
            results = _run(checkout, names, folder, options.timeout)
        report = page.Report(jax.__version__, sources, results, reasons)
        if not report.live:
            raise InputError("no case passes with JAX's own functions; see the logs with --outcomes FOLDER.")
    except (InputError, ReasonsError, ValueError, OSError) as error:
        print(f"python -m conformance: {error}", file=sys.stderr)
        return 2
    _say(report)
    if options.only is None:
        page.merge(options.out, report.version, page.section(report))
        print(f"written: {options.out}")
    return 1 if report.unexplained or report.noticeable else 0


if __name__ == "__main__":
    sys.exit(main())
