"""The transformation: `checkpoint`, its primitives, its policies."""

from autoremat.transform import _composite as _composite  # registers how composites are split
from autoremat.transform._api import checkpoint as checkpoint
from autoremat.transform._api import checkpoint_name as checkpoint_name
from autoremat.transform._api import remat as remat
from autoremat.transform._ask import Equation as Equation
from autoremat.transform._policies import checkpoint_policies as checkpoint_policies
from autoremat.transform._primitives import checkpoint_p as checkpoint_p
from autoremat.transform._primitives import linear_p as linear_p
from autoremat.transform._residuals import Residual as Residual
from autoremat.transform._residuals import Residuals as Residuals
from autoremat.transform._residuals import print_saved_residuals as print_saved_residuals
from autoremat.transform._residuals import saved_residuals as saved_residuals
from autoremat.transform._scan import scan as scan
from autoremat.transform._scan_primitives import scan_p as scan_p
from autoremat.transform._scan_primitives import sweep_p as sweep_p
