"""Log what a checkpoint keeps, as `jax.checkpoint` does."""

from __future__ import annotations

import logging
from typing import Any

import jax

from autoremat._compat import Jaxpr, JaxprEqn, Var, short_aval
from autoremat.transform._partition import Partition
from autoremat.transform._residuals import Residual, hands_on, intermediate, resolve
from autoremat.transform._split import tags_of

_logger = logging.getLogger("autoremat")
_config: Any = jax.config


def log_kept(jaxpr: Jaxpr, part: Partition) -> None:
    """Log what a checkpoint keeps, as `jax.checkpoint` does: at DEBUG, or as a warning under `jax_log_checkpoint_residuals`."""
    level = logging.WARNING if _config.jax_log_checkpoint_residuals else logging.DEBUG
    if not _logger.isEnabledFor(level):
        return
    inputs = [v.aval for i, v in enumerate(jaxpr.invars) if i in part.leaves]
    made = {v: (e, i) for e in part.forward.eqns for i, v in enumerate(e.outvars)}
    tags = tags_of(part.forward.eqns)
    kept = [part.forward.outvars[i] for i in part.kept_results]
    found = [_logged(v, made, tags) for v in kept if v in made]
    lines = [f"  {short_aval(a)}" for a in inputs]
    text = "saving inputs with shapes:\n" + "\n".join(lines) if inputs else ""
    if found:
        text += "\nand " if inputs else ""
        text += "saving these intermediates:\n" + "\n".join(f"  {r.type} {r.description}" for r in found)
    _logger.log(level, "remat-decorated function %s", text or "saving nothing")


def _logged(v: Var, made: dict[Var, tuple[JaxprEqn, int]], tags: dict[Var, frozenset[str]]) -> Residual:
    names = tags.get(v, frozenset())
    while hands_on(made[v][0]) and made[v][0].invars[0] in made:
        v = made[v][0].invars[0]
        names |= tags.get(v, frozenset())
    return intermediate(v.aval, resolve(*made[v]), ", ".join(sorted(names)) or None)
