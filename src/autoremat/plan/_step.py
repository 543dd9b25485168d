"""A training step: where it takes gradients, and the same step with a plan for one of them.

    step(params, state, batch):   ... jax.value_and_grad(loss)(params, batch) ...
                                      the loss, when it is differentiated, is replaced by the planned one

The step is the user's own, jitted or not: its donations and shardings stay. JAX's cache of traces tells the planned step from the other
by a context (`jax.make_user_context`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from autoremat._compat import (
    Jaxpr,
    Tracer,
    differentiated_name,
    eval_jaxpr,
    gradients_through,
    is_ref,
    open_jaxpr,
)
from autoremat._errors import PlanMismatchError
from autoremat.graph import fingerprint
from autoremat.graph._trace import aval_size, tag_of, trace_graph
from autoremat.measure import abstract
from autoremat.plan._alike import Alike
from autoremat.plan._program import planned_function, shardings_key, written_function
from autoremat.plan._rewrite import Decisions
from autoremat.plan._trace import Traced, trace
from autoremat.sharding import WHOLE, Shards, Spec, input_shardings, propagate, shards_of_arrays
from autoremat.transform._jaxpr import all_eqns

_context = jax.make_user_context(None)


@dataclass(frozen=True, eq=False)
class Site:
    """A function that a step differentiates: traced, without the values of its constants; the types of these and of the primals.

    `shards`: how the values of its program are divided among devices.
    """

    traced: Traced
    constants: tuple[Any, ...]
    primals: tuple[Any, ...]
    has_aux: bool
    shards: Shards = WHOLE


@dataclass
class Sites:
    """What a step differentiates, the first of each kind; `refused` says why a function could not be traced."""

    found: dict[str, Site] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    fingerprint: str = ""
    out: Any = None
    args: Any = ()


class _Through:
    """Called with each function that is about to be differentiated. What is differentiated inside it is its own affair.

    `handle` says what is differentiated in its place.
    """

    def __init__(self, handle: Callable[[Traced, tuple[Any, ...]], Callable[..., Any]]) -> None:
        self.handle = handle
        self.refused: list[str] = []
        self._busy = False

    def __call__(self, fun: Callable[..., Any], primals: tuple[Any, ...]) -> Callable[..., Any]:
        if self._busy:
            return fun
        self._busy = True
        try:
            traced = replace(trace(fun, primals, range(len(primals))), name=differentiated_name(fun))
        except TypeError as error:
            self.refused.append(str(error))
            return fun
        finally:
            self._busy = False
        return self._alone(self.handle(traced, primals))

    def _alone(self, planned: Callable[..., Any]) -> Callable[..., Any]:
        """The function, in which nothing is replaced any more."""

        def run(*args: Any) -> Any:
            self._busy = True
            try:
                return planned(*args)
            finally:
                self._busy = False

        return run


def find_sites(step: Callable[..., Any], args: tuple[Any, ...]) -> Sites:
    """Trace a step and note what it differentiates."""
    sites = Sites()

    def note(traced: Traced, primals: tuple[Any, ...]) -> Callable[..., Any]:
        types = tuple(_type(c) for c in traced.constants)
        shapes = jax.tree.map(_type, primals)
        # Without the constants, which are values of the trace that is going on.
        blank = replace(traced, constants=(), leaves=(), written_constants=())
        site = Site(blank, types, shapes, has_aux=_has_aux(traced))
        return _marked(traced, sites.found.setdefault(traced.fingerprint, site).traced.fingerprint)

    through = _Through(note)
    shapes = jax.tree.map(abstract, args)
    with _context(object()), gradients_through(through):
        closed, out = jax.make_jaxpr(step, return_shape=True)(*shapes)
    jaxpr, constants = open_jaxpr(closed)
    sites.refused = through.refused
    sites.fingerprint = fingerprint(trace_graph(jaxpr)[0])
    sites.out = out
    leaves, tree = jax.tree.flatten(shapes)
    placed = input_shardings(jaxpr, (*constants, *leaves))[len(constants) :]
    sites.args = tree.unflatten(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(leaves, placed, strict=True)
    )
    _divide(sites.found, jaxpr, shards_of_arrays(jaxpr, (*constants, *leaves)))
    return sites


_MARK = "autoremat input"


def _marked(traced: Traced, name: str) -> Callable[..., Any]:
    """The function as it is written, the inputs of its program named: their shardings are known when the step has been traced."""

    def mark(number: int, x: Any) -> Any:
        is_array = jnp.ndim(x) > 0 and not is_ref(jax.typeof(x))
        return checkpoint_name(x, f"{_MARK} {name} {number}") if is_array else x

    hoisted = len(traced.constants) - len(traced.written_constants)
    constants = tuple(mark(hoisted + i, x) for i, x in enumerate(traced.written_constants))
    written = written_function(replace(traced, written_constants=constants))

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        marked = [mark(len(traced.constants) + i, x) for i, x in enumerate(leaves)]
        return written(*jax.tree.unflatten(tree, marked))

    return run


def _divide(found: dict[str, Site], jaxpr: Jaxpr, shards: Shards) -> None:
    """Set the shards of sites from those of their inputs, where the step that holds them is divided."""
    if not shards.mesh:
        return
    marks: dict[str, dict[int, Spec]] = {}
    for eqn in all_eqns(jaxpr):
        tag = tag_of(eqn) or ""
        if tag.startswith(_MARK):
            name, number = tag.removeprefix(_MARK).split()
            marks.setdefault(name, {}).setdefault(int(number), shards.of(eqn.outvars[0]))
    for name, specs in marks.items():
        program = found[name].traced.jaxpr
        # Under `vmap` the step has another dimension than the site: what it is divided by there, the site's values do not show.
        known = {
            v: spec if len(spec := specs.get(i, ())) == len(aval_size(v.aval)[0]) else ()
            for i, v in enumerate(program.invars)
        }
        found[name] = replace(found[name], shards=propagate(program, known, shards.mesh))


def _type(x: Any) -> Any:
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _has_aux(traced: Traced) -> bool:
    """Whether there is more than one result: then the first is the loss, as in `jax.value_and_grad(has_aux=True)`."""
    return traced.out_tree.num_leaves != 1


class PlannedStep:
    """A step with a plan for what it differentiates. Called as the step itself.

    On the backend that the plan was verified on it runs the very program that was verified, under the same compiler options; `lower`
    and `trace` are those of the jitted step.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        decisions: Mapping[str, Decisions],
        compiler_options: Mapping[str, Any] | None = None,
        alike: Alike | None = None,
    ) -> None:
        self.jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
        self.decisions = dict(decisions)
        self.compiler_options = dict(compiler_options or {})
        self._alike = alike
        self._compiled: dict[Hashable, Any] = {}
        self.__name__ = getattr(step, "__name__", type(step).__name__)
        self.__wrapped__ = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step. Raises `PlanMismatchError` if it differentiates nothing that the plan is for."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        if not self.compiler_options or any(isinstance(x, Tracer) for x in leaves):
            with self._active():
                return self.jitted(*args, **kwargs)
        key = (tree, tuple((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves))
        if key not in self._compiled:
            lowered = self.lower(*args, **kwargs)
            self._compiled[key] = lowered.compile(compiler_options=self.compiler_options)
        return self._compiled[key](*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The jitted step, lowered with the plan."""
        with self._active():
            return self.jitted.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The jitted step, traced with the plan."""
        with self._active():
            return self.jitted.trace(*args, **kwargs)

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        used: list[str] = []

        def decide(traced: Traced, primals: tuple[Any, ...]) -> Callable[..., Any]:
            seen.append(traced.name)
            found = self.decisions.get(traced.fingerprint)
            if found is None:
                # Not the function itself: it may be one that can be called only once, as those of Flax NNX are.
                return written_function(traced)
            used.append(traced.fingerprint)
            return planned_function(traced, found, self._alike)

        seen: list[str] = []
        with (
            _context((*self.decisions.items(), self._alike and self._alike.token)),
            gradients_through(_Through(decide)),
        ):
            yield
        if seen and not used:
            raise PlanMismatchError(
                f"the plan is for none of what `{self.__name__}` differentiates ({', '.join(dict.fromkeys(seen))}): its operations or "
                "shapes are others. Cheapest fix: call autoremat.fit again for this step and these shapes."
            )


@dataclass(frozen=True, eq=False)
class StepProgram:
    """A step, for the planner: the site that is planned, and the step around it."""

    step: Any
    args: tuple[Any, ...]
    site: Site
    fingerprint: str

    @property
    def argnums(self) -> tuple[int, ...]:
        """All primals of the site."""
        return tuple(range(len(self.site.primals)))

    @property
    def has_aux(self) -> bool:
        """Whether the site returns more than a loss."""
        return self.site.has_aux

    @property
    def key(self) -> Hashable:
        """The step, and how its arguments are sharded."""
        return ("step", self.fingerprint, shardings_key(self.args))

    @property
    def shards(self) -> Shards:
        """From the shardings of the step's arguments."""
        return self.site.shards

    def whole(self, decisions: Decisions, alike: Alike | None = None) -> PlannedStep:
        """The step with decisions written in."""
        return PlannedStep(self.step, {self.site.traced.fingerprint: decisions}, alike=alike)

    def gradient(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The gradient of the site alone; its constants are arguments."""
        traced, has_aux = self.site.traced, self.site.has_aux

        def loss(primals: tuple[Any, ...], constants: tuple[Any, ...]) -> Any:
            outs = eval_jaxpr(traced.jaxpr, *constants, *jax.tree.leaves(primals))
            return (outs[0], outs[1:]) if has_aux else outs[0]

        def gradient(primals: tuple[Any, ...], constants: tuple[Any, ...]) -> Any:
            value, pullback, *aux = jax.vjp(lambda p: loss(p, constants), primals, has_aux=has_aux)
            return value, aux, pullback(jax.numpy.ones_like(value))

        return gradient, (self.site.primals, self.site.constants)
