"""Which compilers of accelerators are here: with them, tests compile for devices that are not."""

from __future__ import annotations

import pytest

from autoremat._errors import TargetError
from autoremat.target._installed import CUDA, LIBTPU, Compiler


def _problem(compiler: Compiler) -> str:
    try:
        compiler.check(compiler.extra)
    except TargetError as error:
        return str(error)
    return ""


needs_tpu = pytest.mark.skipif(bool(_problem(LIBTPU)), reason=_problem(LIBTPU))
needs_gpu = pytest.mark.skipif(bool(_problem(CUDA)), reason=_problem(CUDA))
