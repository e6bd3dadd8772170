"""The overlap kernel: how many paths are active on both of two inputs. Always with hard gates.

**A path**, in any network, is a walk along edges from the first hidden layer to one output. Its stations are units: a unit is
one number of a layer, (channel, position) in a convolution.

* Every weighted layer (linear, convolution) makes units. A filter that reaches into zero padding has no edge there; edges count
  whatever the value of their weight. A unit is *open* when its ReLU-like gate passes it on: h > 0 for ReLU, strictly inside
  the linear part for ReLU6, hard-tanh and clamp, eta >= 0 for linear gating. Units without a gate and cells of average
  pools are always open. Batch-norm (in evaluation) and constant factors are one edge per unit.
* An identity skip is an edge: the path visits no unit of the block it skips. A max-pool is a gate on its edges: only the one
  from the position of the maximum is open.
* A path **begins** at every unit that reads the input directly, once, however many input edges that unit has; input nodes are
  not counted. What is made of the input without weights (reshaped, padded, pooled by averaging, normalised, added) is still
  input; a gate on the input makes units of it. A linear connection from input to output is one path.
* ``bias_paths=True``: a path may also begin at a constant node, one for every layer that adds a constant (a bias, the shift of
  a batch-norm): the constant neuron of the half-space paper. The bias of the output is one path of its own.
* Two edges between the same units (a sum of a unit with itself, padding that repeats a unit) are two paths.

**Ties.** A pre-activation of exactly 0 is closed for ReLU and open for linear gating; on black patches without biases that
decides whole layers. :func:`gate_ties` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unlazy.kernels.capture import (
    Inputs,
    check_numbers,
    evaluation_mode,
    explain_input_errors,
    sample_count,
    take_samples,
)
from unlazy.kernels.gate_calls import record, record_ties
from unlazy.kernels.gated import Gated, has_value_bias, is_stack, net_gates
from unlazy.kernels.gram import Plan, Progress, empty_result, gram, plan_gram
from unlazy.kernels.paths.compiled_product import product_kernel
from unlazy.kernels.paths.count import Program, chain_graph, check_output
from unlazy.kernels.paths.operations import Gate, Mix, Reshape, Scale, Source, Total, Window
from unlazy.kernels.paths.overlap_engine import MORE_THAN_HELD, OverlapKernel
from unlazy.kernels.paths.trace import trace
from unlazy.kernels.paths.unit_graph import Graph, TracedGraph
from unlazy.models.image_net import GatedImageNet
from unlazy.models.net import GatedNet
from unlazy.runtime import Unsupported, require

Memory = str | int | None
CHUNK = 256  # samples recorded at a time, where nothing is known about the network


def overlap_kernel(
    model: nn.Module,
    x: Inputs,
    x2: Inputs | None = None,
    *,
    log: bool = False,
    bias_paths: bool = False,
    output: int | None = None,
    dtype: torch.dtype = torch.float64,
    memory: Memory = None,
    out: Any = None,
    progress: Progress | None = None,
) -> Float[Tensor, "*members n m"] | Any:
    """Lambda(x, x') = number of paths active on both inputs, for every network with ReLU-like gates.

    For dense chains it is the product over layers of the number of units open on both (half-space paper, Section 3.2);
    plain convolutional nets need one number per position and pair, residual nets one per unit and pair, and that is what it
    costs. What a path is: see the top of this module. Operations without a rule raise and are named.

    float64 counts are exact below 2^53, with a relative error of 1e-12 above. Counts that float64 cannot hold raise an error;
    ``log=True`` gives natural logarithms, -inf for no path. ``dtype=torch.float32`` rounds (relative 6e-8).
    ``output``: which output paths lead to, where that matters (outputs behind a shared linear layer have equal counts).
    ``out``: anything of shape ``[n, m]`` that takes slices, filled in place; ``memory``: how much may be used, such as "4GB";
    ``progress(done, tiles)``.
    Ties are decided as said above and counted by :func:`gate_ties`.
    """
    with explain_input_errors(model, x, x2):
        if is_stack(model):
            _refuse_for_stack(output, memory, out, progress)
            gates, gates2 = hard_gates(model, x), None if x2 is None else hard_gates(model, x2)
            biased = bias_paths and model.settings.value_bias
            return _stack_overlap(gates, gates if gates2 is None else gates2, biased=biased, log=log).to(dtype)
        kernel = overlap_engine(
            model, x, log=log, bias_paths=bias_paths, output=output, dtype=_result_dtype(dtype, out)
        )
        return _overlap_gram(kernel, x, x2, memory, out, progress)


def plan_overlap(
    model: nn.Module,
    x: Inputs,
    x2: Inputs | None = None,
    *,
    bias_paths: bool = False,
    output: int | None = None,
    dtype: torch.dtype = torch.float64,
    memory: Memory = None,
    held: bool = True,
) -> Plan:
    """What :func:`overlap_kernel` would do: memory, tiles, numbers a pair, how large counts can get.

    ``held=False``: the result is not in memory, but on disk for example.
    """
    if is_stack(model):
        raise Unsupported(
            "GatedNet", "a stack is computed member by member in one go", "Pick one with member(net, index)."
        )
    with explain_input_errors(model, x, x2):
        kernel = overlap_engine(model, x, log=False, bias_paths=bias_paths, output=output, dtype=dtype)
        return plan_gram(kernel, sample_count(x), None if x2 is None else sample_count(x2), memory, held=held)


def layer_overlap(
    model: nn.Module,
    x: Inputs,
    x2: Inputs | None = None,
    *,
    log: bool = False,
    dtype: torch.dtype = torch.float64,
    memory: Memory = None,
    out: Any = None,
    progress: Progress | None = None,
) -> Float[Tensor, "*members n m"] | Any:
    """prod over layers of the number of units open on both: the paper's formula for any network with ReLU-like gates.

    Equals the overlap kernel for dense chains; treats every other layer as if it were dense. Options as there.
    """
    with explain_input_errors(model, x, x2):
        if is_stack(model):
            _refuse_for_stack(None, memory, out, progress)
            gates, gates2 = hard_gates(model, x), None if x2 is None else hard_gates(model, x2)
            return _stack_overlap(gates, gates if gates2 is None else gates2, biased=False, log=log).to(dtype)
        kernel = layer_overlap_engine(model, x, x2, log=log, dtype=_result_dtype(dtype, out))
        return _overlap_gram(kernel, x, x2, memory, out, progress)


def path_count(
    model: nn.Module,
    x: Inputs,
    *,
    log: bool = False,
    bias_paths: bool = False,
    output: int | None = None,
) -> Float[Tensor, "*members n"]:
    """Number of active paths of each input: the diagonal of the overlap kernel, for the same networks and options."""
    with explain_input_errors(model, x):
        if isinstance(model, GatedNet):
            gates = hard_gates(model, x)
            check_output(output, model.settings.outputs)
            if _has_dense_gates(model, gates):
                everything = [torch.ones_like(layer[..., :1, :]) for layer in gates]
                return _stack_overlap(gates, everything, biased=bias_paths and model.settings.value_bias, log=log)[
                    ..., 0
                ]
        kernel = overlap_engine(model, x, log=log, bias_paths=bias_paths, output=output, dtype=torch.float64)
        return kernel.diagonal(x)


def neural_path_kernel(model: nn.Module, x: Tensor) -> Float[Tensor, "*members n n"]:
    """H(x, x') = sum over input nodes i of x_i x'_i times the paths that begin there: <x, x'> Lambda(x, x') for dense networks.

    d Lambda(x, x') for constant experts (d input nodes of value one). For convolutional networks the sum over input nodes
    does not factor; it is computed as it stands, with input edges counted. For bias-free dense networks with fixed gates and
    independent value weights of mean 0 and variance s^2 the expected tangent kernel of the value weights is
    L s^(2 (L - 1)) H, L weight matrices (Lakshminarayanan and Singh 2020); shared weights add sums over shifts not in H.
    """
    if isinstance(model, GatedNet):
        settings = model.settings
        if settings.value_bias:
            raise _bias_error("GatedNet", "Build it with value_bias=False.")
        if settings.experts == "linear":
            return overlap_kernel(model, x) * (x @ x.mT).double()
        return overlap_kernel(model, x) * next(model.value_layers[0].parameters()).shape[-1]
    with explain_input_errors(model, x):
        graph = _choose_tracer(model)(model, _repeat_first_sample(x)).graph
        _check_products(graph)
        kernel = _traced_engine(model, x, graph, log=False, dtype=torch.float64, products=True)
        return _overlap_gram(kernel, x)


def gate_ties(model: nn.Module, x: Inputs) -> dict[str, Int[Tensor, "*members n"]]:
    """Number of units of each layer that lie exactly on the border of their gate, for each input.

    Pre-activations of exactly 0 for ReLU (closed) and linear gating (open), both borders of truncated gates (closed); for
    max-pools the cells whose maximum is reached twice and is not 0 (the first position counts as open; adaptive max-pools are
    not looked at).
    """
    with explain_input_errors(model, x):
        check_numbers(model, x)
        if isinstance(model, Gated):
            if model.settings.gating == "open":
                return {}
            with evaluation_mode(model), torch.no_grad():
                layers = model.pre_activations(x)
            first = 2 if is_stack(model) else 1
            return {f"layer {i + 1}": (pre == 0).flatten(first).sum(-1) for i, pre in enumerate(layers)}
        parts = [record_ties(model, take_samples(x, slice(i, i + CHUNK))) for i in range(0, sample_count(x), CHUNK)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


# --- from gates ----------------------------------------------------------------------------------------------


def hard_gates(model: nn.Module, x: Inputs) -> list[Tensor]:
    """Open or closed for every unit ``[..., n, units]`` of a dense chain; raises where paths are not a plain product."""
    if isinstance(model, GatedNet):
        return net_gates(model, x)
    traced = trace(model, x)
    odd = _why_not_a_chain(traced.graph)
    if odd is not None:
        raise Unsupported(
            type(model).__name__,
            f"its paths are not one unit per layer ({odd})",
            "overlap_kernel and path_count know such networks; layer_overlap treats every layer as dense.",
        )
    return [traced.masks[index] for index in traced.graph.gates()]


def overlap_from_gates(
    gates: Sequence[Tensor], gates2: Sequence[Tensor], *, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "*members n m"]:
    """The overlap kernel from gates ``[..., n, units]`` of each layer: a product over layers. Gates may be soft."""
    if gates[0].ndim > 2 or gates[0].dtype != torch.bool:
        return _stack_overlap(gates, gates2, biased=False, log=False).to(dtype)
    program = _chain_program(tuple(layer.shape[1] for layer in gates), 1, False, None, gates[0].device)
    nodes = program.graph.gates()
    kernel = product_kernel(
        program,
        lambda part: dict(zip(nodes, part, strict=True)),
        len(gates[0]) * len(gates2[0]),
        log=False,
        dtype=dtype,
        device=gates[0].device,
    )
    return _overlap_gram(kernel, tuple(gates), None if gates2 is gates else tuple(gates2))


def free_path_kernel(gates: Sequence[Tensor], start: Tensor, biases: bool) -> Float[Tensor, "*members n n"]:
    """Kernel of the model that has a free value for every path, in place of a product of weights.

    ``start`` is the kernel of the inputs a path may begin with: 1 for constant experts (then, without biases, this
    is the overlap kernel), x . x' for linear ones. With ``biases`` a path may also begin at the constant node below any
    layer, and a constant is added at the end.
    """
    kernel = start
    for layer in gates:
        common = layer.double() @ layer.double().mT
        kernel = common * (kernel + 1 if biases else kernel)
    return kernel + 1 if biases else kernel


def path_count_from_gates(gates: Sequence[Tensor]) -> Float[Tensor, "*members n"]:
    """Number of active paths of each input from its gates: the product over layers of the number of open units."""
    return torch.stack([layer.sum(-1, dtype=torch.float64) for layer in gates]).prod(0)


def _stack_overlap(gates: Sequence[Tensor], gates2: Sequence[Tensor], *, biased: bool, log: bool) -> Tensor:
    """The recursion over dense layers, all members at once, in float64 or in logarithms."""
    total: Tensor | None = None
    for layer, layer2 in zip(gates, gates2, strict=True):
        common = layer.double() @ layer2.double().mT
        common = common.log() if log else common
        if total is None:
            total = torch.zeros_like(common) if log else torch.ones_like(common)
        total = _add_one(total, log=log) if biased else total
        total = common + total if log else common * total
    assert total is not None
    total = _add_one(total, log=log) if biased else total
    require(log or bool(total.isfinite().all()), MORE_THAN_HELD)
    return total


def _add_one(total: Tensor, *, log: bool) -> Tensor:
    return torch.logaddexp(total, torch.zeros_like(total)) if log else total + 1


# --- kernels of networks -------------------------------------------------------------------------------------


def overlap_engine(
    model: nn.Module,
    x: Inputs,
    *,
    log: bool = False,
    bias_paths: bool = False,
    output: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> OverlapKernel:
    """The overlap kernel of a single network for the Gram engine: a dense chain from its gates, other networks by tracing."""
    check_numbers(model, x)
    if isinstance(model, GatedNet) and _has_dense_gates(model, probe := hard_gates(model, _repeat_first_sample(x))):
        widths = tuple(layer.shape[1] for layer in probe)
        biased = bias_paths and model.settings.value_bias
        program = _chain_program(widths, model.settings.outputs, biased, output, _device_of(x))

        def open_units(part: Inputs) -> dict[int, Tensor]:
            return dict(zip(program.graph.gates(), hard_gates(model, part), strict=True))

        return OverlapKernel(program, open_units, log=log, dtype=dtype, device=_device_of(x))
    graph = _choose_tracer(model)(model, _repeat_first_sample(x)).graph
    return _traced_engine(model, x, graph, log=log, dtype=dtype, bias_paths=bias_paths, output=output)


def layer_overlap_engine(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, log: bool = False, dtype: torch.dtype = torch.float64
) -> OverlapKernel:
    """The layer overlap (product over layers) of a single network for the Gram engine."""
    # Not as many copies as x has samples: an axis of positions could then pass for the axis of samples in both.
    probe = _repeat_first_sample(x, copies=3 if sample_count(x) == 2 else 2)
    widths = tuple(layer[0].numel() for layer in _open_units_by_layer(model, probe))
    program = _chain_program(widths, 1, False, None, _device_of(x))

    def open_units(part: Inputs) -> dict[int, Tensor]:
        found = [layer.flatten(1) for layer in _open_units_by_layer(model, part)]
        same = tuple(layer.shape[1] for layer in found) == widths
        require(same, "the gates of this network depend on its input; there is no common product over layers.")
        return dict(zip(program.graph.gates(), found, strict=True))

    pairs = sample_count(x) * sample_count(x if x2 is None else x2)
    return product_kernel(program, open_units, pairs, log=log, dtype=dtype, device=_device_of(x))


def _traced_engine(
    model: nn.Module,
    x: Inputs,
    graph: Graph,
    *,
    log: bool,
    dtype: torch.dtype,
    bias_paths: bool = False,
    output: int | None = None,
    products: bool = False,
) -> OverlapKernel:
    program = Program(graph, bias_paths=bias_paths, output=output, products=products, device=_device_of(x))
    follow = _choose_tracer(model)

    def open_units(part: Inputs) -> dict[int, Tensor]:
        traced = follow(model, part)
        if traced.graph != graph:
            raise Unsupported(
                type(model).__name__,
                "its layers depend on the input, so that two inputs share no paths",
                "layer_overlap asks only for equal gates.",
            )
        return traced.masks | traced.inputs if products else traced.masks

    return OverlapKernel(program, open_units, log=log, dtype=dtype, device=_device_of(x))


@lru_cache(maxsize=64)
def _chain_program(
    widths: tuple[int, ...], outputs: int, biased: bool, output: int | None, device: torch.device
) -> Program:
    """The program of a dense chain; cached, since training measures the same network at many steps."""
    return Program(chain_graph(widths, biased=biased, outputs=outputs), bias_paths=biased, output=output, device=device)


class _ValueBranch(nn.Module):
    """The value branch of a gated network with given gates, as a module of its own."""

    def __init__(self, model: Gated, gates: list[Tensor]) -> None:
        super().__init__()
        self.model, self.gates = model, gates

    def forward(self, x: Tensor) -> Tensor:
        return self.model.value(x, self.gates)


def _choose_tracer(model: nn.Module) -> Callable[[Any, Inputs], TracedGraph]:
    """The function that traces the model: ours are traced with their own gates given, unless the gates are visible ReLUs."""
    ours = isinstance(model, GatedNet) or (isinstance(model, GatedImageNet) and model.settings.gating != "own")
    return _trace_gated if ours else trace


def _trace_gated(model: Gated, x: Inputs) -> TracedGraph:
    gates = net_gates(model, x)
    return trace(_ValueBranch(model, gates), x, given=gates, given_biased=has_value_bias(model))


def _overlap_gram(
    kernel: OverlapKernel,
    x: Inputs,
    x2: Inputs | None = None,
    memory: Memory = None,
    out: Any = None,
    progress: Progress | None = None,
) -> Tensor | Any:
    """The Gram matrix in one block if the gates of all samples fit, else tile by tile."""
    in_memory = out is None or isinstance(out, Tensor)
    plan = plan_gram(kernel, sample_count(x), None if x2 is None else sample_count(x2), memory, held=in_memory)
    if not plan.caches_all or not in_memory or progress is not None:
        return gram(kernel, x, x2, memory=memory, out=out, progress=progress)
    shape = (plan.rows, plan.columns)
    result = empty_result(shape, kernel.dtype, kernel.device) if out is None else out
    require(tuple(result.shape) == shape, f"out must have shape {shape}, got {tuple(result.shape)}.")
    left = kernel.features(x)
    kernel.block(result, left, left if x2 is None else kernel.features(x2), same=x2 is None)
    return result


def _has_dense_gates(model: GatedNet, gates: Sequence[Tensor]) -> bool:
    """Whether gates have no positions."""
    return all(layer.ndim == (2 if model.members is None else 3) for layer in gates)


def _open_units_by_layer(model: nn.Module, x: Inputs) -> list[Tensor]:
    """Open units of every gate ``[n, ...]``, for any network with ReLU-like gates."""
    if isinstance(model, Gated):
        return net_gates(model, x)
    calls, n = record(model, x), sample_count(x)
    for gate in calls:
        if len(gate.open) != n:
            raise Unsupported(
                gate.name,
                f"its gates have {len(gate.open)} rows for {n} samples, so nothing says which belongs to which",
                "Keep samples on the first axis: [samples, positions, units].",
            )
    return [gate.open for gate in calls]


def _why_not_a_chain(graph: Graph) -> str | None:
    """Why a graph is not a chain of gated dense layers, in words; ``None`` if it is one."""
    waiting = False
    for node in graph.nodes:
        if isinstance(node.operation, Mix):
            if waiting:
                return f"{node.name} reads units without a gate"
            waiting = True
        elif isinstance(node.operation, Gate):
            waiting = False
        plain = isinstance(node.operation, Source | Mix | Gate | Scale | Reshape) and len(node.inputs) <= 1
        if not plain or getattr(node.operation, "groups", 1) > 1:
            return f"{node.name} uses {type(node.operation).__name__.lower()}"
        if isinstance(node.operation, Gate) and len(node.shape) != 1:
            return f"gate {node.name} has positions"
    return None


def _check_products(graph: Graph) -> None:
    """Raise ``Unsupported`` if paths begin elsewhere than at the inputs: at biases, or at inputs changed before the weights."""
    raw: set[int] = set()
    for index, node in enumerate(graph.nodes):
        operation = node.operation
        if getattr(operation, "biased", False):
            raise _bias_error(node.name, "Use a network without biases and batch-norms.")
        changed = isinstance(operation, Scale | Total) or (isinstance(operation, Window) and operation.pooled)
        if changed and raw & set(node.inputs):
            raise Unsupported(node.name, "the input is changed before the first weights", "Give the changed input.")
        if not isinstance(operation, Mix | Gate) and (raw & set(node.inputs) or getattr(operation, "raw", False)):
            raw.add(index)


def _bias_error(name: str, remedy: str) -> Unsupported:
    return Unsupported(name, "paths that begin at a bias are no paths of the input", remedy)


def _refuse_for_stack(*options: Any) -> None:
    plain = all(option is None for option in options)
    require(plain, "output, memory, out and progress are for single networks; a stack gives [members, n, m] in one go.")


def _repeat_first_sample(x: Inputs, copies: int = 2) -> Inputs:
    """The first sample, ``copies`` times: enough to find the shapes in a network."""
    first = take_samples(x, slice(0, 1))
    return pytree.tree_map(lambda leaf: torch.cat([leaf] * copies) if isinstance(leaf, Tensor) else leaf, first)


def _device_of(x: Inputs) -> torch.device:
    return next(leaf.device for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor))


def _result_dtype(dtype: torch.dtype, out: Any) -> torch.dtype:
    return out.dtype if isinstance(out, Tensor) else dtype
