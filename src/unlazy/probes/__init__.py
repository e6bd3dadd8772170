"""What gates and paths do on a set of inputs: half-spaces, allocation of paths, cells and the error no cell can go below."""

from unlazy.checks import explain_errors
from unlazy.probes.halfspaces import HalfSpaces
from unlazy.probes.paths import allocation, cell_floor, count_cells, count_path_regions

__all__ = ["HalfSpaces", "allocation", "cell_floor", "count_cells", "count_path_regions"]

explain_errors(globals())
