"""What a user sees: one view of plain data, several renderings. No JAX.

    dicts of numbers -> Report (frozen view) -> terminal | plain text | JSON

`_build` and `_demo` make the views, `_terminal` renders them, `_format` writes numbers with their units,
`_progress` shows what is being compiled.
"""

from autoremat.report._build import frontier_report as frontier_report
from autoremat.report._build import plan_report as plan_report
from autoremat.report._build import residuals_report as residuals_report
from autoremat.report._calibration import calibration_report as calibration_report
from autoremat.report._demo import model_report as model_report
from autoremat.report._demo import policies_report as policies_report
from autoremat.report._demo import training_report as training_report
from autoremat.report._fit import fit_report as fit_report
from autoremat.report._progress import TerminalProgress as TerminalProgress
from autoremat.report._targets import targets_report as targets_report
from autoremat.report._terminal import fit_text as fit_text
from autoremat.report._terminal import plan_text as plan_text
from autoremat.report._terminal import show as show
from autoremat.report._terminal import terminal as terminal
from autoremat.report._terminal import to_json as to_json
from autoremat.report._terminal import to_text as to_text
from autoremat.report._view import Report as Report
