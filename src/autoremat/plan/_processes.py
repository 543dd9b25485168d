"""Several processes of one job (`jax.distributed`) must run one plan: their programs meet in collectives."""

from __future__ import annotations

import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from autoremat._errors import PlanMismatchError
from autoremat.plan._rewrite import Decisions


def agree(fingerprint: str, decisions: Decisions | None, what: str) -> None:
    """Raise `PlanMismatchError` if the processes of this job do not have the same decisions for the same function.

    `None`: no plan was found. All processes must call it, or they wait for each other. With one process there is nothing to agree on.
    """
    if jax.process_count() == 1:
        return
    mine = np.frombuffer(hashlib.sha256(repr((fingerprint, decisions)).encode()).digest(), np.uint8)
    found = np.asarray(multihost_utils.process_allgather(mine.astype(np.int32)))
    other = [i for i, theirs in enumerate(found) if not np.array_equal(theirs, found[0])]
    if other:
        raise PlanMismatchError(
            f"`{what}`: the {len(found)} processes of this job have different plans: those of process 0 and of "
            f"{', '.join(map(str, other))} differ. A job runs one program. Cheapest fix: make the plan in one process, save it, and load "
            "that file in all."
        )
