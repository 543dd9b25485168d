"""What operations cost: FLOPs, bytes, seconds. No JAX here."""

from autoremat.cost._annotate import graph_costs as graph_costs
from autoremat.cost._annotate import graph_flops as graph_flops
from autoremat.cost._annotate import op_picoseconds as op_picoseconds
from autoremat.cost._annotate import runs_programs as runs_programs
from autoremat.cost._devices import DEVICES as DEVICES
from autoremat.cost._devices import Device as Device
from autoremat.cost._devices import device as device
from autoremat.cost._devices import device_for_backend as device_for_backend
from autoremat.cost._devices import picoseconds as picoseconds
from autoremat.cost._devices import seconds as seconds
from autoremat.cost._model import Cost as Cost
from autoremat.cost._model import CostRule as CostRule
from autoremat.cost._registry import graph_cost as graph_cost
from autoremat.cost._registry import is_fusible as is_fusible
from autoremat.cost._registry import op_cost as op_cost
from autoremat.cost._registry import register_cost as register_cost
from autoremat.cost._registry import registered_primitives as registered_primitives
from autoremat.cost._rules import elementwise as elementwise
from autoremat.cost._table import Costs as Costs
from autoremat.cost._table import CostTable as CostTable
from autoremat.cost._table import op_key as op_key
from autoremat.cost._table import priced as priced
