"""From a joint program and decisions to the two programs that run.

    joint:   (primals, constants, tangents) -> (outs, tangents out)
    forward: (primals, constants) -> (outs, what is kept and is no out already)
    linear:  (leaves, tangents)   -> tangents out       leaves = what it reads of (primals, constants), then kept

`linear` decodes what was kept, runs again what is missing, and then is linear in the tangents.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autoremat._compat import (
    Jaxpr,
    JaxprEqn,
    Var,
    dce,
    in_scope,
    name_p,
    new_jaxpr,
    weakref_lru_cache,
    without_dead_code,
)
from autoremat._errors import UnmatchedNameWarning
from autoremat.transform._coding import coded
from autoremat.transform._decide import GraphPolicy, decider_for
from autoremat.transform._jaxpr import (
    cached_by_jaxpr,
    free_vars,
    is_var,
    live_eqns,
    map_eqns,
    subjaxprs,
)
from autoremat.transform._linearize import Joint, linearize_cached
from autoremat.transform._policies import nested, requested_names
from autoremat.transform._split import Split, prune, split_eqns

BACKWARD_PASS = "checkpoint backward pass"
"""What a jaxpr says it was traced for if it is the backward pass of a checkpoint."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Partition:
    """See the module's docstring.

    `leaves` are positions in (primals, constants), `kept_results` positions in the results of `forward`; `reruns` is
    what runs again.
    """

    forward: Jaxpr
    linear: Jaxpr
    leaves: tuple[int, ...]
    num_kept: int
    kept_results: tuple[int, ...]
    constants: tuple[Any, ...]
    nonzero_outs: tuple[bool, ...]
    reruns: tuple[JaxprEqn, ...]

    @property
    def recomputes(self) -> bool:
        """Whether anything is computed again in the backward pass; to pass a value on is no computation."""
        return any(_computes(e) for e in self.reruns)


def _computes(eqn: JaxprEqn) -> bool:
    inner = subjaxprs(eqn)
    return any(_computes(e) for j in inner for e in j.eqns) if inner else eqn.primitive is not name_p


def partition(jaxpr: Jaxpr, nonzero: tuple[bool, ...], policy: Any) -> Partition:
    """Linearize `jaxpr` and split it as `policy` says."""
    joint = linearize_cached(_with_outer_policy(jaxpr, policy), nonzero)
    _warn_of_unmatched_names(jaxpr, joint, policy)
    return emit(joint, split_eqns(joint.forward_eqns, joint.demanded, decider_for(policy, joint)))


def _changed_by_outer_policy(jaxpr: Jaxpr, policy: Any) -> Jaxpr | None:
    def change(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive.name != "autoremat_checkpoint" or isinstance(eqn.params["policy"], GraphPolicy):
            return eqn
        both = nested(eqn.params["policy"], policy)
        return eqn if both is eqn.params["policy"] else eqn.replace(params=dict(eqn.params, policy=both))

    changed = map_eqns(jaxpr, change)
    return None if changed is jaxpr else changed  # a cache that held its own key would hold it forever


_changed_by_outer_policy_cached = weakref_lru_cache(_changed_by_outer_policy)


def _with_outer_policy(jaxpr: Jaxpr, policy: Any) -> Jaxpr:
    """The jaxpr with nested checkpoints that keep what the outer policy keeps, too: in JAX the outer policy wins.

    Policies that see the whole program (`GraphPolicy`) decide for their own region alone.
    """
    if policy is None or isinstance(policy, GraphPolicy):
        return jaxpr
    return _changed_by_outer_policy_cached(jaxpr, policy) or jaxpr


partition_cached = cached_by_jaxpr(partition)


def emit(joint: Joint, split: Split) -> Partition:
    """Build the two programs."""
    rerun = prune(split.rerun, [v for v in joint.demanded if v not in split.kept])
    backward_eqns, reads = _live_backward(joint, rerun)
    kept = [v for v in split.kept if v in reads]
    leaves = tuple(i for i, v in enumerate(joint.inputs) if v in reads)

    forward_eqns = list(split.forward)
    decode_eqns: list[JaxprEqn] = []
    encoded_in: list[Var] = []
    outs = list(joint.outs)
    kept_results: list[int] = []
    for v in kept:
        eqns, out, received, decoding = coded(v, split.kept[v])
        forward_eqns += eqns
        encoded_in.append(received)
        decode_eqns += decoding
        # A result of the function that is also kept is one array, not two.
        if not any(out is o for o in outs):
            outs.append(out)
        kept_results.append(next(i for i, o in enumerate(outs) if o is out))
    forward = without_dead_code(new_jaxpr(joint.inputs, outs, live_eqns(forward_eqns, outs), joint.like))
    linear = new_jaxpr(
        [*(joint.inputs[i] for i in leaves), *encoded_in, *joint.tangents],
        joint.tangent_outs,
        [*decode_eqns, *backward_eqns],
        joint.like,
    )
    return Partition(
        forward=forward,
        linear=linear,
        leaves=leaves,
        num_kept=len(kept),
        kept_results=tuple(kept_results),
        constants=joint.constants,
        nonzero_outs=joint.nonzero_outs,
        reruns=tuple(_independent(backward_eqns, joint.tangents)),
    )


def _live_backward(joint: Joint, rerun: Sequence[JaxprEqn]) -> tuple[list[JaxprEqn], set[Var]]:
    """The equations of the linear part, without what is dead inside a `scan` or `cond`, and the values that they read."""
    eqns = [*(in_scope(e, "rematted_computation") for e in rerun), *joint.linear_eqns]
    tangents = set(joint.tangents)
    free = [v for v in free_vars(eqns, joint.tangent_outs) if v not in tangents]
    whole = new_jaxpr([*free, *joint.tangents], joint.tangent_outs, eqns, joint.like)
    live, used = dce(whole, [True] * len(joint.tangent_outs))
    return list(live.eqns), {v for v, u in zip(free, used, strict=False) if u}


def _independent(eqns: Sequence[JaxprEqn], tangents: Sequence[Var]) -> Iterator[JaxprEqn]:
    depends = set(tangents)
    for eqn in eqns:
        if any(is_var(v) and v in depends for v in eqn.invars):
            depends.update(eqn.outvars)
        else:
            yield eqn


def _names_in(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is name_p:
            yield eqn.params["name"]
        for inner in subjaxprs(eqn):
            yield from _names_in(inner)


def _warn_of_unmatched_names(jaxpr: Jaxpr, joint: Joint, policy: Any) -> None:
    requested = requested_names(policy)
    # A backward pass has only the names that it computes again.
    if not requested or jaxpr.debug_info.traced_for == BACKWARD_PASS:
        return
    found = set(_names_in(jaxpr))
    for eqn in joint.forward_eqns:
        if eqn.primitive is name_p:
            found.add(eqn.params["name"])
        for inner in subjaxprs(eqn):
            found.update(_names_in(inner))
    if missing := sorted(requested - found):
        where = jaxpr.debug_info.func_src_info
        warnings.warn(
            f"a checkpoint policy names {missing}, but no value inside {where} is tagged so; found: {sorted(found)}. "
            "The policy has no effect for these names. Cheapest fix: correct the spelling, or tag the value with "
            "autoremat.checkpoint_name(x, name).",
            UnmatchedNameWarning,
            stacklevel=2,
        )
