"""Deciders: from a policy, or from an explicit list of kept values, to decisions for `split_eqns`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from autoremat._compat import JaxprEqn, Offloadable, SaveableType, Var, name_p
from autoremat.storage import DEVICE_NAME, offload
from autoremat.transform._ask import Equation, asker, equation
from autoremat.transform._linearize import Joint
from autoremat.transform._policies import NothingSaveable, check_decision, single_policies
from autoremat.transform._split import RECURSE, Decider, composite_rules, may_run_again


@runtime_checkable
class GraphPolicy(Protocol):
    """A policy that sees the whole joint program at once, as the planner's do."""

    def decider(self, joint: Joint) -> Decider:
        """The decisions for this program."""
        ...


@dataclass(frozen=True)
class PolicyDecider:
    """Asks a callable about each equation, as `jax.checkpoint` does, and about the tags of its outputs."""

    policy: Any

    @cached_property
    def _singles(self) -> list[_Asked]:
        return [_Asked(policy) for policy in single_policies(self.policy)]

    def decide(self, eqn: JaxprEqn, wanted: Sequence[int], names: Sequence[frozenset[str]]) -> Any:
        if eqn.primitive is name_p:
            return {}  # the tag belongs to the value, so its producer is asked
        tags = dict(zip(wanted, names, strict=True))
        kept = {i: s for i in wanted if (s := self._storage_of_tagged(eqn, i, tags[i]))}
        if len(kept) < len(wanted) and eqn.primitive.name in composite_rules:
            return kept or RECURSE
        if not may_run_again(eqn):
            return dict.fromkeys(wanted, DEVICE_NAME) | kept
        about = equation(eqn, wanted, frozenset().union(*names))
        for single in self._singles:
            if len(kept) < len(wanted) and (storage := single.storage_of_outputs(eqn, about)):
                others = [i for i in wanted if i not in kept and not single.excludes(tags[i])]
                kept |= dict.fromkeys(others, storage)
        return dict(sorted(kept.items()))

    def repeats(self, eqn: JaxprEqn) -> bool:
        """A debug print happens again in the backward pass, unless the policy saves it."""
        about = equation(eqn, range(len(eqn.outvars)), frozenset())
        return _Asked(self.policy).storage_of_outputs(eqn, about) is None

    def keeps_name(self, eqn: JaxprEqn) -> bool:
        """Whether the policy keeps a value under the tag that `eqn` gives it."""
        return self._storage_of_tagged(eqn, 0, frozenset({eqn.params["name"]})) is not None

    def _storage_of_tagged(self, eqn: JaxprEqn, output: int, tags: frozenset[str]) -> str | None:
        """How the policy keeps an output for one of its tags, if it does."""
        about = equation(eqn, [output], tags)
        found = (
            single.storage(about, name_p, about.outputs, {"name": tag})
            for single in self._singles
            if not single.excludes(tags)
            for tag in sorted(tags)
        )
        return next((storage for storage in found if storage), None)


@dataclass(frozen=True)
class _Asked:
    """A policy, and how it is asked."""

    policy: Any

    @cached_property
    def _answer(self) -> Callable[..., Any]:
        return asker(self.policy)

    def excludes(self, tags: frozenset[str]) -> bool:
        """Whether a value with these tags must not be kept."""
        excludes = getattr(self.policy, "excludes", None)
        return excludes is not None and excludes(tags)

    def storage(
        self, about: Equation, prim: Any, avals: Sequence[Any], params: Mapping[str, Any]
    ) -> str | None:
        """The name of the codec by which the policy keeps a value; `None` if the value is to be computed again."""
        decision = check_decision(self._answer(about, prim, avals, params), self.policy)
        if isinstance(decision, Offloadable):
            return offload(decision.src, decision.dst).name
        return DEVICE_NAME if isinstance(decision, SaveableType) else None

    def storage_of_outputs(self, eqn: JaxprEqn, about: Equation) -> str | None:
        """The same, of the outputs of an equation."""
        return self.storage(about, eqn.primitive, [v.aval for v in eqn.invars], eqn.params)


@dataclass(frozen=True)
class KeepDecider:
    """Keeps exactly the variables of `keep`, each with the codec named there; everything else runs again."""

    keep: Mapping[Var, str]

    def decide(self, eqn: JaxprEqn, wanted: Sequence[int], names: Sequence[frozenset[str]]) -> Any:
        return {i: self.keep[eqn.outvars[i]] for i in wanted if eqn.outvars[i] in self.keep}


def decider_for(policy: Any, joint: Joint) -> Decider:
    """The decisions of `policy` for a program; no policy means that nothing is saved but the inputs."""
    if policy is None:
        return PolicyDecider(NothingSaveable())
    if isinstance(policy, GraphPolicy):
        return policy.decider(joint)
    return PolicyDecider(policy)
