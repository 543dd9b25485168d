"""The graph that every planner decision is made on. No JAX here, the tracer aside."""

from autoremat.graph._check import check as check
from autoremat.graph._fingerprint import fingerprint as fingerprint
from autoremat.graph._ir import Graph as Graph
from autoremat.graph._ir import Op as Op
from autoremat.graph._ir import Value as Value
