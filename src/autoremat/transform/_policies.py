"""The policies of `jax.checkpoint_policies`: same names, same meaning, compared by value.

A policy is called as `policy(primitive, *input_avals, **params)`, once for each equation of the linearized function whose
output the backward pass needs, and returns a bool, `Saveable`, `Recompute` or `Offloadable(src, dst)`. One that has a parameter
`equation` gets an `Equation` by it. Ours are frozen
dataclasses, so that two equal policies share one cached plan. Where JAX's documentation and its behaviour differ
(`save_anything_except_these_names`), ours does what the documentation says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from autoremat._compat import Offloadable, Recompute, RecomputeType, Saveable, SaveableType, name_p
from autoremat._errors import PolicyError
from autoremat.transform._ask import Equation, asker, by_value

Decision = Any
Policy = Callable[..., Decision]

# The last one wraps a scaled matrix product; JAX's own policies know it by this name too.
_DOTS = frozenset({"dot_general", "conv_general_dilated", "scaled_matmul_wrapper"})


def check_decision(decision: Any, policy: Any) -> Any:
    """Turn a policy's answer into `Saveable`, `Recompute` or `Offloadable`; anything else is an error."""
    if isinstance(decision, bool):
        return Saveable if decision else Recompute
    if isinstance(decision, (SaveableType, RecomputeType, Offloadable)):
        return decision
    raise PolicyError(
        f"the checkpoint policy {policy!r} returned {decision!r} of type {type(decision).__name__}; it must return a "
        "bool, or one of jax.ad_checkpoint.Saveable, Recompute, Offloadable. Cheapest fix: wrap its result in bool(...)."
    )


@dataclass(frozen=True)
class EverythingSaveable:
    """Keep whatever the backward pass reads."""

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> bool:
        return True


@dataclass(frozen=True)
class NothingSaveable:
    """Keep nothing but the inputs."""

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> bool:
        return False


@dataclass(frozen=True)
class DotsSaveable:
    """Keep the outputs of matrix products."""

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> bool:
        return prim.name in _DOTS


@dataclass(frozen=True)
class DotsWithNoBatchDimsSaveable:
    """Keep the outputs of matrix products that have no batch dimensions."""

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> bool:
        if prim.name == "scaled_matmul_wrapper":
            return avals[0].shape[0] == 1
        return _has_no_batch_dims(prim, params)


def _has_no_batch_dims(prim: Any, params: dict[str, Any]) -> bool:
    if prim.name != "dot_general":
        return False
    _, (lhs_batch, rhs_batch) = params["dimension_numbers"]
    return not lhs_batch and not rhs_batch


@dataclass(frozen=True)
class OffloadDotWithNoBatchDims:
    """Move the outputs of matrix products without batch dimensions from one memory to another."""

    offload_src: str
    offload_dst: str

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Decision:
        if _has_no_batch_dims(prim, params):
            return Offloadable(src=self.offload_src, dst=self.offload_dst)
        return Recompute


@dataclass(frozen=True)
class SaveOnlyTheseNames:
    """Keep the values that `checkpoint_name` tagged with one of the names."""

    names: frozenset[str]

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> bool:
        return prim is name_p and params["name"] in self.names

    @property
    def requested(self) -> frozenset[str]:
        return self.names


@dataclass(frozen=True)
class SaveAnyNamesButThese:
    """Keep the tagged values, except those with one of the names. Untagged values are not kept."""

    names: frozenset[str]

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> bool:
        return prim is name_p and params["name"] not in self.names

    @property
    def requested(self) -> frozenset[str]:
        return self.names


@dataclass(frozen=True)
class SaveAnythingExceptTheseNames:
    """Keep every value but those tagged with one of the names: the value is excluded, not the tag alone."""

    names: frozenset[str]

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> bool:
        return not (prim is name_p and params["name"] in self.names)

    def excludes(self, names: frozenset[str]) -> bool:
        """Whether a value with these tags must not be kept, whichever equation made it."""
        return bool(self.names & names)

    @property
    def requested(self) -> frozenset[str]:
        return self.names


@dataclass(frozen=True)
class SaveFromBothPolicies:
    """Keep what either of two policies keeps."""

    first: Policy
    second: Policy

    def __call__(self, prim: Any, *avals: Any, equation: Equation | None = None, **params: Any) -> Decision:
        one = check_decision(asker(self.first)(equation, prim, avals, params), self.first)
        other = check_decision(asker(self.second)(equation, prim, avals, params), self.second)
        for decision in (one, other):
            if isinstance(decision, SaveableType):
                return Saveable
        return one if isinstance(one, Offloadable) else other

    @property
    def requested(self) -> frozenset[str]:
        return requested_names(self.first) | requested_names(self.second)


@dataclass(frozen=True)
class SaveAndOffloadOnlyTheseNames:
    """Keep some tagged values, move others to another memory, and compute the rest again."""

    saved: frozenset[str]
    offloaded: frozenset[str]
    offload_src: str
    offload_dst: str

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Decision:
        if prim is name_p and params["name"] in self.saved:
            return Saveable
        if prim is name_p and params["name"] in self.offloaded:
            return Offloadable(src=self.offload_src, dst=self.offload_dst)
        return Recompute

    @property
    def requested(self) -> frozenset[str]:
        return self.saved | self.offloaded


@dataclass(frozen=True)
class NestedPolicies(SaveFromBothPolicies):
    """The policy of a checkpoint inside another one, and then the outer policy: in JAX the outer one wins.

    The names that the outer one asks for are looked for in its own region, not in this part of it.
    """

    @property
    def requested(self) -> frozenset[str]:
        return requested_names(self.first)


def nested(inner: Policy | None, outer: Policy) -> Policy:
    """The policy of a checkpoint with policy `inner`, while the checkpoint round it is differentiated."""
    if isinstance(outer, NothingSaveable) or inner == outer:
        return inner or outer
    return NestedPolicies(inner or NothingSaveable(), outer)


def compared_by_value(policy: Any) -> Any:
    """The policy, functions in it compared by value where they can be (see `_ask`)."""
    if isinstance(policy, SaveFromBothPolicies):
        return replace(policy, first=compared_by_value(policy.first), second=compared_by_value(policy.second))
    return by_value(policy)


def single_policies(policy: Policy) -> list[Policy]:
    """The policies of which a combined one keeps what any keeps."""
    if isinstance(policy, SaveFromBothPolicies):
        return [*single_policies(policy.first), *single_policies(policy.second)]
    return [policy]


def requested_names(policy: Any) -> frozenset[str]:
    """The names that a policy was given; empty for a policy that knows none."""
    return getattr(policy, "requested", frozenset())


def save_only_these_names(*names_which_can_be_saved: str) -> Policy:
    """Keep only the values tagged with one of the names."""
    return SaveOnlyTheseNames(frozenset(names_which_can_be_saved))


def save_any_names_but_these(*names_not_to_save: str) -> Policy:
    """Keep all tagged values but those with one of the names."""
    return SaveAnyNamesButThese(frozenset(names_not_to_save))


def save_anything_except_these_names(*names_not_to_save: str) -> Policy:
    """Keep all values, tagged or not, but those tagged with one of the names."""
    return SaveAnythingExceptTheseNames(frozenset(names_not_to_save))


def save_from_both_policies(policy_1: Policy, policy_2: Policy) -> Policy:
    """Keep what either policy keeps."""
    return SaveFromBothPolicies(policy_1, policy_2)


def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Policy:
    """Move matrix products without batch dimensions from `offload_src` to `offload_dst`."""
    return OffloadDotWithNoBatchDims(offload_src, offload_dst)


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Any,
    names_which_can_be_offloaded: Any,
    offload_src: str,
    offload_dst: str,
) -> Policy:
    """Keep some tagged values and move others from `offload_src` to `offload_dst`.

    Raises `ValueError` where a name stands in both lists.
    """
    saved, offloaded = frozenset(names_which_can_be_saved), frozenset(names_which_can_be_offloaded)
    if both := saved & offloaded:
        raise ValueError(
            "The names should be exclusive and should not intersect in `names_which_can_be_saved` and "
            f"`names_which_can_be_offloaded`; in both: {sorted(both)}. Cheapest fix: take them out of one list."
        )
    return SaveAndOffloadOnlyTheseNames(saved, offloaded, offload_src, offload_dst)


checkpoint_policies = SimpleNamespace(
    everything_saveable=EverythingSaveable(),
    nothing_saveable=NothingSaveable(),
    dots_saveable=DotsSaveable(),
    checkpoint_dots=DotsSaveable(),
    dots_with_no_batch_dims_saveable=DotsWithNoBatchDimsSaveable(),
    checkpoint_dots_with_no_batch_dims=DotsWithNoBatchDimsSaveable(),
    offload_dot_with_no_batch_dims=offload_dot_with_no_batch_dims,
    save_anything_except_these_names=save_anything_except_these_names,
    save_any_names_but_these=save_any_names_but_these,
    save_only_these_names=save_only_these_names,
    save_from_both_policies=save_from_both_policies,
    save_and_offload_only_these_names=save_and_offload_only_these_names,
)
