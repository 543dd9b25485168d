"""The planner: from a function and a budget to a plan that the compiler confirmed."""

from autoremat.plan._account import Account as Account
from autoremat.plan._batch_size import largest_batch as largest_batch
from autoremat.plan._calibrate import calibrate as calibrate
from autoremat.plan._fit import Fit as Fit
from autoremat.plan._fit import fit as fit
from autoremat.plan._plan import Frontier as Frontier
from autoremat.plan._plan import FrontierPoint as FrontierPoint
from autoremat.plan._plan import Plan as Plan
from autoremat.plan._plan import frontier as frontier
from autoremat.plan._plan import plan as plan
