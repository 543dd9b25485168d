"""What holds for all tests: the CPU, a fixed terminal, hypothesis with a seed that can be repeated.

Warnings are errors; the exceptions stand in pyproject.toml, each with its reason.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, Phase, settings

# Before the first import of JAX. Set from outside, a variable wins: JAX_PLATFORMS=cuda runs on a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # for shardings, shard_map and collectives
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("AUTOREMAT_CACHE", "off")  # what a test compiles, it compiles

# No deadline: the first example of a test compiles. Not derandomized: every run looks at new examples, and
# says by which seed to see them again.
settings.register_profile(
    "ci",
    max_examples=25,
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("ci"), max_examples=500)
settings.register_profile("exhaustive", settings.get_profile("ci"), max_examples=1250)
# To see at once that something fails: the example as it was found.
settings.register_profile("unshrunk", settings.get_profile("ci"), phases=[Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed before hypothesis reads it and before xdist hands the options to its workers."""
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The seed, among the closing lines."""
    terminalreporter.write_line(f"hypothesis: --hypothesis-seed={config.getoption('hypothesis_seed')}")


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed tables depend on neither the width nor the colours of the terminal that runs the tests."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
