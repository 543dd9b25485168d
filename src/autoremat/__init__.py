"""Rematerialization for JAX that is given a memory budget and proves that it is met."""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from autoremat._errors import AutorematError as AutorematError
from autoremat._errors import AutorematWarning as AutorematWarning
from autoremat._errors import BudgetError as BudgetError
from autoremat._errors import CompileError as CompileError
from autoremat._errors import CostTableError as CostTableError
from autoremat._errors import DifferentiationError as DifferentiationError
from autoremat._errors import EffectError as EffectError
from autoremat._errors import InfeasibleBudgetError as InfeasibleBudgetError
from autoremat._errors import PlanError as PlanError
from autoremat._errors import PlanFileError as PlanFileError
from autoremat._errors import PlanMismatchError as PlanMismatchError
from autoremat._errors import PolicyError as PolicyError
from autoremat._errors import TargetError as TargetError
from autoremat._errors import UnknownPrimitiveWarning as UnknownPrimitiveWarning
from autoremat._errors import UnmatchedNameWarning as UnmatchedNameWarning
from autoremat.cost import Cost as Cost
from autoremat.cost import CostTable as CostTable
from autoremat.cost import register_cost as register_cost
from autoremat.measure import MemoryUse as MemoryUse
from autoremat.measure import jaxpr_flops as jaxpr_flops
from autoremat.measure import measure as measure
from autoremat.plan import Account as Account
from autoremat.plan import Fit as Fit
from autoremat.plan import Frontier as Frontier
from autoremat.plan import FrontierPoint as FrontierPoint
from autoremat.plan import Plan as Plan
from autoremat.plan import calibrate as calibrate
from autoremat.plan import fit as fit
from autoremat.plan import frontier as frontier
from autoremat.plan import largest_batch as largest_batch
from autoremat.plan import plan as plan
from autoremat.predict import Prediction as Prediction
from autoremat.predict import predict as predict
from autoremat.target import Target as Target
from autoremat.target import TargetInfo as TargetInfo
from autoremat.target import resolve as target
from autoremat.target import targets as targets
from autoremat.transform import Equation as Equation
from autoremat.transform import Residual as Residual
from autoremat.transform import Residuals as Residuals
from autoremat.transform import checkpoint as checkpoint
from autoremat.transform import checkpoint_name as checkpoint_name
from autoremat.transform import checkpoint_policies as checkpoint_policies
from autoremat.transform import print_saved_residuals as print_saved_residuals
from autoremat.transform import remat as remat
from autoremat.transform import saved_residuals as saved_residuals
from autoremat.transform import scan as scan

try:
    __version__ = _version("autoremat")
except _PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0.0.0"

__all__ = [
    "Account",
    "AutorematError",
    "AutorematWarning",
    "BudgetError",
    "CompileError",
    "Cost",
    "CostTable",
    "CostTableError",
    "DifferentiationError",
    "EffectError",
    "Equation",
    "Fit",
    "Frontier",
    "FrontierPoint",
    "InfeasibleBudgetError",
    "MemoryUse",
    "Plan",
    "PlanError",
    "PlanFileError",
    "PlanMismatchError",
    "PolicyError",
    "Prediction",
    "Residual",
    "Residuals",
    "Target",
    "TargetError",
    "TargetInfo",
    "UnknownPrimitiveWarning",
    "UnmatchedNameWarning",
    "calibrate",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_policies",
    "fit",
    "frontier",
    "jaxpr_flops",
    "largest_batch",
    "measure",
    "plan",
    "predict",
    "print_saved_residuals",
    "register_cost",
    "remat",
    "saved_residuals",
    "scan",
    "target",
    "targets",
]
