"""Equations that encode a kept value in the forward pass and decode it in the backward pass."""

from __future__ import annotations

from typing import Any

from autoremat._compat import JaxprEqn, Var, new_var
from autoremat.storage import codec_named
from autoremat.transform._jaxpr import traced_eqns


def coded(v: Var, codec_name: str) -> tuple[list[JaxprEqn], Any, Var, list[JaxprEqn]]:
    """Encoding equations, the encoded atom, the variable that receives it, and decoding equations that make `v`."""
    codec = codec_named(codec_name)
    if codec_name == "device":
        return [], v, v, []
    encoding, (out,) = traced_eqns(lambda x: [codec.encode(x)], [v], "encode")
    received = new_var(out.aval)
    decoding, (decoded,) = traced_eqns(lambda x: [codec.decode(x, v.aval.shape)], [received], "decode")
    decoding[-1] = decoding[-1].replace(outvars=[v if o is decoded else o for o in decoding[-1].outvars])
    return encoding, out, received, decoding
