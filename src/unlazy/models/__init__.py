"""Networks of gates and experts: gate rules, settings, the network they build, and stacks of many members."""

from unlazy.checks import explain_errors
from unlazy.models.build import build_stack, member, to_standard_parametrisation
from unlazy.models.gates import Gates
from unlazy.models.net import GatedNet
from unlazy.models.spec import Init

__all__ = ["GatedNet", "Gates", "Init", "build_stack", "member", "to_standard_parametrisation"]

explain_errors(globals())
