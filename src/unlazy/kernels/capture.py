"""Running a module and catching, at every layer, what went in and the gradient at what came out.

Nothing of the module changes: hooks are removed, ``training`` and ``requires_grad`` flags restored, no gradient is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from unlazy.checks import find_refusal
from unlazy.kernels.check_memory import GraphFacts
from unlazy.kernels.layer_rules import Call
from unlazy.kernels.weight_uses import WeightUse, watch_uses
from unlazy.models.dense_layers import Affine
from unlazy.runtime import InputError, Unsupported, exact_float32, require

Inputs = Any  # a tensor, a tuple of arguments, or a mapping of keyword arguments; samples along the first axis
TABLES = (nn.Embedding, nn.EmbeddingBag)
STATISTICS = ("running_mean", "running_var")  # buffers that training moves


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Evaluation mode inside the block, with the list of all modules; each of them gets its own flag back.

    Encoder layers take their plain way: the fused one has no gradient, hides its gates and refuses padding masks here. What
    torch.compile made runs as it was written, and float32 means float32 on a GPU too.
    """
    modules, fused = list(model.modules()), torch.backends.mha.get_fastpath_enabled()
    flags = [module.training for module in modules]
    if any(flags):
        model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            _plain_gradients(modules),
            exact_float32(),
            torch.compiler.set_stance("force_eager") if _is_compiled(modules) else nullcontext(),
        ):
            yield modules
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, flag in zip(modules, flags, strict=True):
            if module.training != flag:
                module.training = flag


def plain_gradients(model: nn.Module) -> AbstractContextManager[None]:
    """Inside the block embeddings have dense gradients, and what re-entrant checkpointing wraps runs directly.

    Sparse gradients have no rows to read, and re-entrant checkpointing allows no gradient by chosen parameters.
    """
    return _plain_gradients(list(model.modules()))


@contextmanager
def _plain_gradients(modules: Sequence[nn.Module]) -> Iterator[None]:
    tables = [m for m in modules if isinstance(m, TABLES) and m.sparse]
    reentrant = vars(checkpoint)["CheckpointFunction"]
    try:
        for table in tables:
            table.sparse = False
        vars(checkpoint)["CheckpointFunction"] = _Unwrapped
        yield
    finally:
        vars(checkpoint)["CheckpointFunction"] = reentrant
        for table in tables:
            table.sparse = True


class _Unwrapped:
    """In place of ``torch.utils.checkpoint.CheckpointFunction``: calls the function and recomputes nothing."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_random_state: bool, *arguments: Any) -> Any:
        return function(*arguments)


def _is_compiled(modules: Sequence[nn.Module]) -> bool:
    """Whether torch.compile compiled one of the modules: hooks do not see the layers of compiled code."""
    return any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in modules)


@contextmanager
def require_gradients(parameters: list[nn.Parameter], others: list[nn.Parameter]) -> Iterator[None]:
    """Inside the block ``parameters`` require gradients and ``others`` do not; afterwards all flags are restored."""
    flags = [(parameter, parameter.requires_grad) for parameter in [*parameters, *others]]
    try:
        _set_flags([(parameter, False) for parameter in others])
        _set_flags([(parameter, True) for parameter in parameters])
        yield
    finally:
        _set_flags(flags)


def _set_flags(flags: Sequence[tuple[nn.Parameter, bool]]) -> None:
    for parameter, flag in flags:
        if parameter.requires_grad != flag:
            parameter.requires_grad_(flag)


def call_model(model: nn.Module, x: Inputs) -> Tensor:
    """The module on a batch, its output as ``[n, outputs]``; of several outputs the one that :func:`predictions` names."""
    return output_rows(_raw_output(model, x), sample_count(x))


def output_rows(out: Any, n: int) -> Tensor:
    """What a module returned for ``n`` samples, as ``[n, outputs]``; see :func:`call_model`."""
    if not isinstance(out, Tensor):
        out = _only_tensor(out)
    fits = out.ndim >= 1 and out.shape[0] == n
    require(fits, f"the model must return one row per sample: {n} samples, output {tuple(out.shape)}.")
    rows: Tensor = out.reshape(n, -1)
    return rows


def _raw_output(model: nn.Module, x: Inputs) -> Any:
    return model(**x) if isinstance(x, Mapping) else model(*x) if isinstance(x, tuple | list) else model(x)


def predictions(out: Any) -> Tensor | None:
    """The tensor of a dict, a tuple or an output object that stands for predictions: ``logits``, or the only one at its top.

    ``None`` where several could be meant: two tensors at the top, or tensors in a nested part before it, as in
    ``((scores, other), hidden)``. States that follow, as in ``(scores, (hidden, cell))``, are no predictions.
    """
    if isinstance(out, Tensor):
        return out
    named = _named_parts(out)
    found = named.get("logits") if named else getattr(out, "logits", None)
    if isinstance(found, Tensor):
        return found
    parts = list(named.values()) if named else list(out) if isinstance(out, Sequence) else []
    tensors = [part for part in parts if _is_array(part)]
    first = next((leaf for leaf in pytree.tree_leaves(parts) if _is_array(leaf)), None)
    return first if len(tensors) == 1 and tensors[0] is first else None


def _is_array(part: Any) -> bool:
    """Whether this is a tensor of more than a single number: a loss is not."""
    return isinstance(part, Tensor) and part.ndim >= 1


def _named_parts(out: Any) -> dict[Any, Any]:
    if isinstance(out, Mapping):
        return dict(out)
    return {field.name: getattr(out, field.name) for field in fields(out)} if is_dataclass(out) else {}


def _only_tensor(out: Any) -> Tensor:
    found = predictions(out)
    if found is not None:
        return found
    what, example, named = type(out).__name__, "out.scores", _named_parts(out)
    if named:
        first = next(iter(named))
        what = f"{what} with {', '.join(map(str, named))}"
        example = f"out[{first!r}]" if isinstance(out, Mapping) else f"out.{first}"
    elif isinstance(out, tuple | list):
        what, example = f"{what} of {len(out)}", "out[0]"
    raise InputError(
        f"the model returns a {what}, and none of it is logits or the only tensor; "
        f"wrap it in a module that returns the tensor that counts, {example} for example."
    )


def sample_count(x: Inputs) -> int:
    """Number of samples: the length of the first axis, which all tensors must share."""
    if isinstance(x, Tensor) and x.ndim:
        return x.shape[0]
    sizes = {leaf.shape[:1] for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)}
    if len(sizes) != 1:
        raise InputError(_unequal_message(x, sorted(size[0] if size else 0 for size in sizes)))
    (size,) = sizes
    require(len(size) == 1, "x is a single number; samples stand along the first axis of a tensor.")
    return size[0]


def _unequal_message(x: Inputs, lengths: list[int]) -> str:
    if lengths:
        return f"inputs must be tensors of equal first axis, got lengths {lengths}."
    kinds = sorted({type(leaf).__name__ for leaf in pytree.tree_leaves(x)}) or [type(x).__name__]
    remedy = "torch.from_numpy(x)" if kinds == ["ndarray"] else "torch.as_tensor(x)"
    what = "a tensor, a tuple of tensors or a mapping of them"
    return f"x must be {what}, samples along the first axis; got {', '.join(kinds)}. {remedy} makes one."


def check_module(model: Any) -> None:
    """Raise ``InputError`` if ``model`` is not a module, but a function for example."""
    require(
        isinstance(model, nn.Module),
        f"a torch module is needed, got {type(model).__name__}; "
        "put a function into a class with forward(self, x), derived from torch.nn.Module.",
    )


@contextmanager
def explain_input_errors(model: nn.Module, x: Inputs, x2: Inputs | None = None) -> Iterator[None]:
    """Turn an error of torch in the block into an ``InputError`` if the model does not accept such samples.

    Nothing is tried beforehand: only after an error the model is called with the first sample of each set. If it accepts the
    sample, the original error is raised.
    """
    check_module(model)
    try:
        yield
    except (Unsupported, torch.OutOfMemoryError):
        raise
    except Exception as error:
        for name, given in (("x", x), ("x2", x2)):
            if given is not None:
                check_inputs(given)
                refusal = find_refusal(model, name, take_samples(given, slice(0, 1)))
                if refusal is not None:
                    raise InputError(refusal) from error
        raise


def channels_last(x: Inputs) -> Inputs:
    """Images with their channels innermost: convolutions run nearly twice as fast, and give the same numbers."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}

    def lay_out(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim in formats:
            return leaf.contiguous(memory_format=formats[leaf.ndim])
        return leaf

    return lay_out(x) if isinstance(x, Tensor) else pytree.tree_map(lay_out, x)


def repeat_samples(x: Inputs) -> Inputs:
    """The batch twice over: in a batch of one, a sample's values could not be told from values shared by all samples."""
    return pytree.tree_map(lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) else leaf, x)


def take_samples(x: Inputs, part: slice) -> Inputs:
    """The samples of a slice, of every tensor in ``x``."""
    if isinstance(x, Tensor):
        return x[part]
    return pytree.tree_map(lambda leaf: leaf[part] if isinstance(leaf, Tensor) else leaf, x)


def check_inputs(x: Inputs) -> None:
    """Raise ``InputError`` if the batch is empty or contains NaN or infinite numbers."""
    require(sample_count(x) > 0, "there are no samples.")
    for leaf in pytree.tree_leaves(x):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            if bool(leaf.sum().isfinite()):
                continue  # a single NaN or infinity would make the sum NaN or infinite
            bad = int((~torch.isfinite(leaf)).sum())
            require(bad == 0, f"{bad} of the inputs are NaN or infinite; clean them first.")


def check_numbers(model: nn.Module, *data: Inputs) -> None:
    """Raise ``InputError`` if samples, parameters or running statistics contain NaN or infinite numbers.

    Other buffers are not checked: attention masks are infinite on purpose.
    """
    for x in data:
        check_inputs(x)
    with torch.no_grad():
        sums = [tensor.sum() for tensor in _trained_tensors(model) if _has_numbers(tensor)]
        if all(math.isfinite(number) for some in _by_kind(sums) for number in torch.stack(some).abs().tolist()):
            return  # a single NaN or infinity would make the sum NaN or infinite
    statistics = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(STATISTICS)]
    held = {name: tensor for name, tensor in (*model.named_parameters(), *statistics) if _has_numbers(tensor)}
    for name, tensor in held.items():
        bad = int((~torch.isfinite(tensor)).sum())
        require(
            bad == 0, f"{bad} of the {tensor.numel()} numbers in {name} are NaN or infinite: training has diverged."
        )


def _trained_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and running statistics, shared ones several times; half the time of ``named_parameters``."""
    for module in model.modules():
        yield from (p for p in module._parameters.values() if p is not None)
        yield from (b for name, b in module._buffers.items() if name in STATISTICS and b is not None)


def _has_numbers(tensor: Tensor) -> bool:
    if is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() > 1)  # bytes cannot be summed


def _by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors of one device and one type together."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())


@dataclass
class Tap:
    """One call of a watched module, or of a function that reads a watched weight, before gradients are known.

    ``rows``: where it reads some rows of the weight only, the first of them and how many the weight has.
    """

    module: nn.Module
    input: Tensor
    output: Tensor
    version: int
    rows: tuple[int, int] | None = None

    def fits(self, n: int, *, folded: bool) -> bool:
        """Whether there may be one entry a sample; ``folded``: other axes may lie before samples, or be folded into them."""
        if len(self.input) == n == len(self.output):
            return True
        return folded and _entries(self.input) % n == 0 and _entries(self.output) == _entries(self.input)

    def positions(self, n: int) -> int:
        """Entries of one of ``n`` samples."""
        return _entries(self.input) // n

    def arrange(self, values: Tensor, n: int, layout: int | None) -> Tensor:
        """Inputs or gradients with samples first, ``[n, t, ...]``, as a view where that is possible.

        ``layout``: how samples and positions lie in the axes before the last, 0 for samples first, 1 for positions first;
        ``None``: samples are the first axis.
        """
        if layout is None:
            return values
        flat = values.reshape(-1, *values.shape[-1:]) if values.is_floating_point() else values.reshape(-1)
        return flat.unflatten(0, (n, -1)) if layout == 0 else flat.unflatten(0, (-1, n)).transpose(0, 1)


def _entries(values: Tensor) -> int:
    """Samples times positions: the entries of all axes but that of numbers (tokens are numbers themselves)."""
    return values.numel() // values.shape[-1] if values.is_floating_point() else values.numel()


def forward_with_taps(model: nn.Module, x: Inputs, watched: set[nn.Module]) -> tuple[Tensor, list[Tap]]:
    """Output ``[n, outputs]`` and a tap per call of a watched module, connected by autograd.

    The graph begins at the first taps and needs no parameter: weights are constants here. A model that changes a
    layer's output in place would spoil the tap, so such models run once more with copies.
    """
    try:
        out, taps = _run_with_hooks(model, x, watched, copies=False)
    except RuntimeError as error:
        if "in-place" not in str(error):
            raise
        return _run_with_hooks(model, x, watched, copies=True)
    if any(tap.output._version != tap.version for tap in taps):
        return _run_with_hooks(model, x, watched, copies=True)
    return out, taps


def _run_with_hooks(model: nn.Module, x: Inputs, watched: set[nn.Module], *, copies: bool) -> tuple[Tensor, list[Tap]]:
    taps: list[Tap] = []

    def hook(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> Tensor | None:
        first = arguments[0] if arguments else next(iter(options.values()))
        entered = first[-1] if isinstance(module, Affine) else first
        if not output.requires_grad:
            output.requires_grad_(True)
        taps.append(Tap(module, entered.detach(), output, output._version))
        return output.clone() if copies else None

    def note(use: WeightUse, entered: Tensor, output: Tensor, rows: tuple[int, int] | None) -> Tensor:
        if not output.requires_grad:
            output.requires_grad_(True)
        taps.append(Tap(use, entered.detach(), output, output._version, rows))
        return output.clone() if copies else output

    uses = [module for module in watched if isinstance(module, WeightUse)]
    handles = [
        module.register_forward_hook(hook, with_kwargs=True) for module in watched if not isinstance(module, WeightUse)
    ]
    try:
        with torch.enable_grad(), watch_uses(uses, note, sample_count(x)):
            return call_model(model, x), taps
    finally:
        for handle in handles:
            handle.remove()


TapGradients = list[list[Tensor] | Tensor | None]
MOVES_ENTRIES = ("Index", "Gather", "Scatter", "MaskedSelect", "Take", "Put", "Sort", "Topk", "Pack", "Embedding")


def graph_nodes(out: Tensor) -> Iterator[Any]:
    """Every node of autograd's graph behind a tensor, once."""
    seen, waiting = set[Any](), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
            yield node


def moves_entries(facts: GraphFacts) -> bool:
    """Whether the way to the output picks entries by numbers or masks, or is written by hand: layers may see another order."""
    return facts.custom or any(_moves_entries(kind) for kind in facts.kinds)


@cache
def _moves_entries(kind: str) -> bool:
    return any(part in kind for part in MOVES_ENTRIES)


def count_reads(out: Tensor, parameters: Sequence[Tensor]) -> list[int]:
    """How often each parameter is read on the way to ``out``, whether or not anything flows there."""
    counts = dict.fromkeys(map(id, parameters), 0)
    for node in graph_nodes(out):
        for before, _ in node.next_functions:
            read = id(getattr(before, "variable", None))
            if read in counts:
                counts[read] += 1
    return [counts[id(parameter)] for parameter in parameters]


def tap_gradients(out: Tensor, taps: list[Tap], directions: Tensor, *, batched: bool) -> TapGradients:
    """For every tap the gradient of ``out . directions[k]`` at its output, one ``[n, ...]`` per k; ``None`` where unused.

    Samples do not meet inside the model, so one backward pass per direction serves all of them.
    """
    if not taps or not out.requires_grad:
        return [None] * len(taps)
    numbers: dict[int, int] = {}  # one call may be tapped twice, for its weight and for its bias
    for tap in taps:
        numbers.setdefault(id(tap.output), len(numbers))
    outputs = list({id(tap.output): tap.output for tap in taps}.values())
    seeds = directions[:, None, :].expand(-1, out.shape[0], -1)  # [k, n, outputs]
    found: TapGradients
    if batched and len(directions) > 1:
        found = list(torch.autograd.grad(out, outputs, seeds, is_grads_batched=True, allow_unused=True))
    else:
        rows = [
            torch.autograd.grad(out, outputs, seed, retain_graph=k + 1 < len(seeds), allow_unused=True)
            for k, seed in enumerate(seeds)
        ]
        found = [None if column[0] is None else list(column) for column in zip(*rows, strict=True)]
    return [found[numbers[id(tap.output)]] for tap in taps]


class EntryCheck:
    """Checks :func:`tap_gradients`: whether entry i of a tap feeds output i and no other.

    Gradients of outputs with a random weight each must be the gradients found, entry by entry, with these weights. To be made
    before :func:`tap_gradients`, which frees the graph.
    """

    def __init__(self, out: Tensor, taps: list[Tap], directions: Tensor) -> None:
        random, self.taps, self.n = torch.Generator().manual_seed(0), taps, len(out)
        self.mixed, self.weights = (
            torch.randn(size, generator=random, dtype=torch.float64).to(directions)
            for size in (len(directions), self.n)
        )
        seed = torch.outer(self.weights, self.mixed @ directions)
        self.weighted: Sequence[Tensor | None] = [None] * len(taps)
        if taps and out.requires_grad:
            outputs = [tap.output for tap in taps]
            self.weighted = torch.autograd.grad(out, outputs, seed, retain_graph=True, allow_unused=True)

    def holds(self, number: int, found: list[Tensor] | Tensor | None, layout: int | None) -> bool:
        """Whether it holds for the tap of this number, if samples lie as ``layout`` says (:meth:`Tap.arrange`)."""
        expected = self.weighted[number]
        if found is None or expected is None or not expected.numel():
            return True
        own = sum(factor.to(part) * part for factor, part in zip(self.mixed, found, strict=True))
        own, wanted = (self.taps[number].arrange(part, self.n, layout) for part in (own, expected))
        own = own * self.weights.to(own).reshape(-1, *(1,) * (own.ndim - 1))
        bound = min(1e3 * torch.finfo(own.dtype).eps, 0.1) * float(own.abs().max())
        return float((own - wanted).abs().max()) <= bound


def calls_by_module(
    taps: list[Tap], found: TapGradients, n: int, layouts: Mapping[nn.Module, int]
) -> dict[nn.Module, list[Call]]:
    """The calls of each watched module that reach the output, samples first."""
    grouped: dict[nn.Module, list[Call]] = {}
    for tap, gradient in zip(taps, found, strict=True):
        if gradient is not None:
            grouped.setdefault(tap.module, []).append(_make_call(tap, gradient, n, layouts.get(tap.module)))
    return grouped


def _make_call(tap: Tap, gradients: list[Tensor] | Tensor, n: int, layout: int | None) -> Call:
    if layout is None and tap.rows is None:
        return Call(tap.module, tap.input, gradients)
    arranged = [tap.arrange(gradient, n, layout) for gradient in gradients]
    if tap.rows is not None:  # zero for the rows of the weight that the call does not read
        start, whole = tap.rows
        arranged = [F.pad(gradient, (start, whole - start - gradient.shape[-1])) for gradient in arranged]
    return Call(tap.module, tap.arrange(tap.input, n, layout), arranged)
