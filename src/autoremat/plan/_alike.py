"""Parts of programs that are alike, such as equal layers: one stands for all where only memory matters.

What is traced and linearized of a part is kept by its jaxpr, so that a prediction traces each kind of layer once. Programs that are
compiled keep their own parts: the names and source lines of operations, which profilers show, are those of each layer.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from autoremat._compat import Jaxpr
from autoremat.plan._segments import Span, signature
from autoremat.transform._jaxpr import all_eqns


class Alike:
    """Hands out one jaxpr for all parts of the same structure.

    `token` stands for it in the keys of JAX's caches, which would keep it alive.
    """

    def __init__(self) -> None:
        self.token = object()
        self._of_span: WeakKeyDictionary[Jaxpr, dict[Span, Jaxpr]] = WeakKeyDictionary()
        self._of_kind: dict[str, Jaxpr] = {}

    def one_for(self, part: Jaxpr, whole: Jaxpr, span: Span) -> Jaxpr:
        """The first part that was like this one, which is `span` of `whole`.

        A part with effects stands for itself, and so does one with a `custom_vjp`: what its rule keeps is not seen in the program.
        """
        if part.effects or any(e.primitive.name == "custom_vjp_call" for e in all_eqns(part)):
            return part
        known = self._of_span.setdefault(whole, {})
        if span not in known:
            known[span] = self._of_kind.setdefault(signature(part), part)
        return known[span]
