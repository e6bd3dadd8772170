"""The tangent kernel of one module for the Gram engine: picks and checks a rule for each layer, makes features, fills blocks."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointError

from unlazy.kernels.capture import (
    EntryCheck,
    Inputs,
    Tap,
    TapGradients,
    call_model,
    calls_by_module,
    channels_last,
    check_numbers,
    count_reads,
    evaluation_mode,
    forward_with_taps,
    moves_entries,
    repeat_samples,
    require_gradients,
    sample_count,
    take_samples,
    tap_gradients,
)
from unlazy.kernels.check_memory import CheckResult, StaleCheck, graph_facts, recall, remember, structure_key
from unlazy.kernels.convolution_windows import Windows
from unlazy.kernels.gated import with_exact_gradients
from unlazy.kernels.gram import TooLittleMemory, parse_memory, size_text
from unlazy.kernels.jacobian import rows_by_sample
from unlazy.kernels.layer_rules import (
    Call,
    Factors,
    Positions,
    Products,
    Rows,
    Share,
    constant_rule,
    linear_rule,
    rule_for,
    weight_use_rule,
)
from unlazy.kernels.selection import (
    Outputs,
    Parameters,
    direction_count,
    output_directions,
    own_parameters,
    select_parameters,
)
from unlazy.kernels.tangent_blocks import Buffers, explicit_rows, fill_full, fill_trace, small_gram
from unlazy.kernels.weight_uses import WeightUse, find_added, find_uses
from unlazy.models.dense_layers import Affine
from unlazy.runtime import Unsupported, require

CHECK_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3}  # rounding passes, a rule that does not fit never does
# For activations and gradients while features are made: little, so that they stay near the cache, but some samples at a time.
WORK_BYTES, DEVICE_WORK_BYTES, WORK_SHARE, WORK_SAMPLES = 2**27, 2**32, 0.25, 12
SMALL_BYTES, SMALL_BUDGET = 2**25, 2**28  # a kernel that takes so little needs no look at what is free
FINDINGS = ("plain_layout", "follow_inputs", "dtype", "device", "coarsest", "feature_bytes", "work", "methods")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)  # grouped ones are faster, forward and back, with positions innermost
FORMS = {
    Factors: "outer products, never formed",
    Positions: "position by position",
    Windows: "explicit gradients, one filter tap at a time",
    Rows: "explicit gradients",
}


Form = tuple[type[Share], ...]  # the classes in which the shares of a layer are held


BATCHED = (linear_rule, constant_rule, weight_use_rule)  # whose models take all directions in one backward pass


class RuleMismatch(Exception):  # noqa: N818
    """A layer's rule does not fit: a call without one entry a sample in order, or a layer that only some samples use."""


class TangentKernel:
    """The tangent kernel of one module, as a :class:`~unlazy.kernels.gram.Kernel` for the Gram engine.

    ``chosen``: the parameters, by name. ``fast``: the modules served by a rule, and whether weight and bias are chosen.
    ``idle``: modules among them that no sample uses. ``forms``: in which form each module's shares are held.
    """

    follows_functions = True  # whether weights that functions read are looked for

    def __init__(
        self,
        model: nn.Module,
        x: Inputs,
        x2: Inputs | None = None,
        *,
        outputs: Outputs = "trace",
        parameters: Parameters = "trainable",
        method: str = "auto",
        surrogate: bool = False,
        memory: str | int | None = None,
        reuse_check: bool = False,
    ) -> None:
        require(method in ("auto", "loop"), f"method must be 'auto' or 'loop', got {method!r}.")
        check_numbers(model, *(data for data in (x, x2) if data is not None))
        self.chosen = select_parameters(model, parameters)
        self.model = model if surrogate else with_exact_gradients(model)
        self.fast: dict[nn.Module, tuple[bool, bool]] = {}
        self.uses: list[WeightUse] = []
        self.layouts: dict[nn.Module, int] = {}  # where samples are not simply the first axis
        self.idle: set[nn.Module] = set()
        self.forms: dict[nn.Module, Form] = {}
        self.explicit: set[nn.Module] = set()  # rows on both sides: samples of two sizes would be held in two forms
        self.chunk, self.fixed_bytes, self.rough, self.plain_layout, self.follow_inputs = 1, 0, False, False, True
        self.buffers = Buffers()
        asked = (repr(outputs), repr(parameters), method, surrogate, repr(memory))
        key = structure_key(model, (x, x2), *asked) if reuse_check else None
        found = None if key is None else recall(model, key)
        self.is_checked = found is not None
        if found is None:
            self._check(x, x2, outputs, method)
            found = CheckResult({} if key is None else self._findings())
            if key is not None:
                remember(model, key, found)
        else:
            self._take_findings(found.findings)
        self._graphs = found.graphs
        self.count = direction_count(outputs, self._no_outputs.shape[1])
        work, most = self.work, max(sample_count(x), 0 if x2 is None else sample_count(x2))
        small = (self.feature_bytes + work + 8 * self.count**2 * most) * most < SMALL_BYTES
        self.budget = (
            SMALL_BUDGET if memory is None and small and self.is_checked else parse_memory(memory, self.device)
        )
        self._check_memory()
        self.directions, pairing = output_directions(outputs, self._no_outputs)
        self.tail: tuple[int, ...] = (self.count,) * 2 if pairing == "full" else ()
        on_device = self.device.type == "cuda"
        wanted = max(WORK_SAMPLES, (DEVICE_WORK_BYTES if on_device else WORK_BYTES) // max(1, work))
        self.chunk = max(1, min(1024, most, wanted, int(WORK_SHARE * self.budget) // max(1, work)))
        checked = max(_bytes(self.chosen.values()), 2 * max(_bytes([p]) for p in self.chosen.values()))
        # The check holds one gradient, then a layer's of two samples.
        self.work_bytes = self.fixed_bytes + max(work * self.chunk, checked)
        self.best_tile = 4096 if on_device else 512

    def _check(self, x: Inputs, x2: Inputs | None, outputs: Outputs, method: str) -> None:
        """Pick a rule for each layer, check it, and read off what features cost."""
        self.fast = self._modules_with_rule() if method == "auto" else {}
        self.plain_layout = any(isinstance(m, CONVOLUTIONS) and m.groups > 1 for m in self.model.modules())
        with self.ready():
            probes = [_first_and_last(data) for data in (x, x2) if data is not None]
            follow = method == "auto" and self.follows_functions
            if follow:
                self._find_uses(probes[0])
            seen = [self._check_rules(probe, outputs) for probe in probes]
            # A second look, at layers that lost their rule because functions read their weights, and at what samples share.
            if follow and self._find_uses(probes[0], shared=True):
                try:
                    seen = [self._check_rules(probe, outputs) for probe in probes]
                except (
                    RuntimeError,
                    ValueError,
                    IndexError,
                    Unsupported,
                ):  # the model has no place for views of samples
                    self._drop([use for use in self.uses if use.shared and use in self.fast])
                    seen = [self._check_rules(probe, outputs) for probe in probes]
            costs = [self._bytes_per_sample(each) for each in seen]
            if self.explicit:
                costs = [self._bytes_per_sample(each) for each in seen]
        self.feature_bytes, self.work = (max(cost) for cost in zip(*costs, strict=True))
        self.methods = self._describe_methods()

    def _find_uses(self, probe: Inputs, *, shared: bool = False) -> bool:
        """Add what functions read of the chosen parameters that no layer's rule serves; whether there is anything new.

        ``shared``: also what all samples share (:class:`WeightUse`).
        """
        tried = {id(use.parameter) for use in self.uses}
        unserved = {id(parameter) for parameter in self._rest()} - tried
        candidates = {name: p for name, p in self.chosen.items() if id(p) in unserved}
        if not candidates:
            return False
        found = find_uses(lambda n: call_model(self.model, take_samples(probe, slice(0, n))), candidates)
        read = {id(use.parameter) for use in found}
        if shared:
            found += find_added(self.model, {name: p for name, p in candidates.items() if id(p) not in read})
        else:
            found = [use for use in found if not use.shared]
        self.uses += found
        self.fast |= {use: use.picked for use in found}
        return bool(found)

    def _findings(self) -> dict[str, Any]:
        """What the check found, modules given by number: nothing that keeps the model alive."""
        numbers = {module: number for number, module in enumerate([*self.model.modules(), *self.uses])}
        found: dict[str, Any] = {name: getattr(self, name) for name in FINDINGS}
        found["width"] = self._no_outputs.shape[1]
        found["fast"] = [(numbers[module], picked) for module, picked in self.fast.items()]
        found["forms"] = [(numbers[module], form) for module, form in self.forms.items()]
        found["layouts"] = [(numbers[module], layout) for module, layout in self.layouts.items()]
        found["uses"] = [(use.kind, use.name, use.shared, use.place is not None) for use in self.uses]
        return found | {name: [numbers[module] for module in getattr(self, name)] for name in ("idle", "explicit")}

    def _take_findings(self, found: dict[str, Any]) -> None:
        """The inverse of :meth:`_findings`."""
        self.uses = [
            find_added(self.model, {name: self.chosen[name]})[0]
            if added
            else WeightUse(self.chosen[name], kind, name, shared=shared)
            for kind, name, shared, added in found["uses"]
        ]
        modules = [*self.model.modules(), *self.uses]
        for name in FINDINGS:
            setattr(self, name, found[name])
        self._no_outputs = torch.empty(0, found["width"], dtype=self.dtype, device=self.device)
        self.fast = {modules[number]: picked for number, picked in found["fast"]}
        self.forms = {modules[number]: form for number, form in found["forms"]}
        self.layouts = {modules[number]: layout for number, layout in found["layouts"]}
        self.idle, self.explicit = ({modules[number] for number in found[name]} for name in ("idle", "explicit"))

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Context in which features are made: evaluation mode, and parameters that require no gradient."""
        with torch.inference_mode(False), evaluation_mode(self.model) as modules:
            every = {p: None for module in modules for p in module._parameters.values() if p is not None}
            with require_gradients([], list(every)):
                yield

    def features(self, x: Inputs) -> list[Share]:
        """Shares of all chosen parameters for the samples ``x``, always in one order; made ``chunk`` samples at a time."""
        n = sample_count(x)
        held: list[Share] = []
        for start in range(0, n, self.chunk):
            part = slice(start, min(start + self.chunk, n))
            for number, share in enumerate(self._shares(take_samples(x, part))):
                if start == 0:
                    held.append(_empty_share(share, n, whole=part.stop == n))
                if _is_held_as_rows(share):
                    share.write_rows(held[number].tensors()[0][part])
                elif share is not held[number]:
                    for room, tensor in zip(held[number].tensors(), share.tensors(), strict=True):
                        if room.shape[1:] != tensor.shape[1:]:
                            raise RuleMismatch
                        room[part] = tensor
        return held

    def block(self, out: Tensor, a: list[Share], b: list[Share], *, same: bool) -> None:
        """Fill ``out`` with the kernel of two sets of features; ``same``: both are one set."""
        with matmul_precision(self.rough):
            if self.tail:
                fill_full(out, a, b, self.buffers, same=same)
            else:
                fill_trace(out, a, b, self.buffers, same=same)

    # --- checks, and the choice of rules ---------------------------------------------------------------------

    def _modules_with_rule(self) -> dict[nn.Module, tuple[bool, bool]]:
        """Modules with a rule whose parameters are all their own: (weight chosen, bias chosen)."""
        owners: dict[int, int] = {}
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        wanted = {id(parameter) for parameter in self.chosen.values()}
        found = {}
        for module in self.model.modules():
            own = dict(module.named_parameters(recurse=False))
            plain = set(own) <= {"weight", "bias"} and all(
                owners[id(p)] == 1 and p.is_floating_point() for p in own.values()
            )
            weight, bias = (name in own and id(own[name]) in wanted for name in ("weight", "bias"))
            if plain and (weight or bias) and rule_for(module) is not None:
                found[module] = (weight, bias)
        return found

    def _check_output(self, out: Tensor) -> None:
        name = type(self.model).__name__
        if not out.is_floating_point():
            remedy = "torch.view_as_real(out)" if out.is_complex() else "logits in place of classes"
            raise Unsupported(name, f"its output is {out.dtype}, not real numbers", f"Return {remedy}.")
        require(out.shape[1] > 0, f"{name} returns no outputs: {tuple(out.shape)}.")

    def _check_memory(self) -> None:
        """Raise ``TooLittleMemory`` if the gradients of one sample do not fit the memory; nothing is allocated before."""
        width = self._no_outputs.shape[1]
        self.fixed_bytes = self.count * width * self._no_outputs.element_size()  # the directions
        if self.fixed_bytes + self.work > self.budget:
            raise TooLittleMemory(
                f"{size_text(self.budget)} is too small: the gradients of one sample in {self.count} directions take "
                f"{size_text(self.fixed_bytes + self.work)}. Give more memory, or fewer outputs."
            )

    def _check_differentiable(self, probe: Inputs) -> None:
        """Raise ``Unsupported`` if no parameter has a gradient. (If only the chosen ones have none, the kernel is 0.)"""
        with require_gradients(list(self.model.parameters()), []), torch.enable_grad():
            if not call_model(self.model, probe).requires_grad:
                raise Unsupported(
                    type(self.model).__name__,
                    "its output has no gradient by any parameter: it is detached, or made without gradients",
                    "Look for detach(), torch.no_grad() or operations without a derivative in its forward.",
                )

    def _check_samples_apart(self, together: Tensor, alone: Tensor) -> None:
        if not self._are_equal(together, alone):
            raise Unsupported(
                type(self.model).__name__,
                "the output for a sample depends on the other samples of the batch",
                "The tangent kernel is defined on batches of one; take the mixing layer out, or wrap the model.",
            )

    def _are_equal(self, together: Tensor, alone: Tensor) -> bool:
        """Whether outputs are the same up to rounding."""
        bound = 1e3 * torch.finfo(self.coarsest).eps * max(float(alone.abs().max()), 1.0)
        return bool((together - alone).abs().max() <= bound)

    def _check_rules(self, probe: Inputs, outputs: Outputs) -> tuple[list[Tap], dict[nn.Module, list[Call]]]:
        """Compare every rule with the gradients of two single samples; a rule that disagrees is dropped.

        For random weights c of the two samples, one backward pass gives |sum c_i grad f(x_i)|^2 for every module. It must equal
        sum c_i c_j K_ij by the rule. Also, only calls of its module may read a parameter. Returns the taps and the calls of the
        batch of two.
        """
        out, taps = self._forward(probe)
        self._check_output(out)
        self.dtype, self.device, self._no_outputs = out.dtype, out.device, out.detach().new_empty(0, out.shape[1])
        self.count = direction_count(outputs, out.shape[1])
        self.coarsest = _least_precise([out, *self.model.parameters(), *pytree.tree_leaves(probe)])
        random = torch.Generator().manual_seed(0)
        direction = torch.randn(1, out.shape[1], generator=random, dtype=torch.float64).to(out)
        weights = torch.randn(2, generator=random, dtype=torch.float64).to(out)
        by_module = self._calls(out, taps, direction, demote=True)
        owned = {module: own_parameters(module, picked) for module, picked in self.fast.items()}
        alone, exact, read = self._combined_gradients(probe, direction[0], weights, owned)
        self._check_samples_apart(out.detach(), alone)
        if not any(read.values()):
            self._check_differentiable(probe)
        products = torch.outer(weights, weights)

        def is_exact(module: nn.Module) -> bool:
            shares = self._apply(module, by_module[module]) if module in by_module else []
            if shares is None:
                return False
            terms = products * small_gram(shares) if shares else torch.zeros_like(products)
            rule, size = float(terms.sum()), float(terms.trace())  # the sum may cancel
            return abs(rule - exact[module]) <= CHECK_TOLERANCE.get(self.coarsest, 0.05) * max(exact[module], size)

        for module in owned:
            elsewhere = read[module] > 2 * len(by_module.get(module, ()))
            if elsewhere or not is_exact(module):
                del self.fast[module]
            elif module not in by_module:
                self.idle.add(module)
            elif module in self.idle:  # called by some samples, not by others
                del self.fast[module]
                self.idle.discard(module)
        return taps, by_module

    def _combined_gradients(
        self, probe: Inputs, direction: Tensor, weights: Tensor, owned: dict[nn.Module, list[nn.Parameter]]
    ) -> tuple[Tensor, dict[nn.Module, float], dict[nn.Module, int]]:
        """Outputs of the two samples, each in a batch of one; |sum_i c_i grad f(x_i)|^2 by module; and reads by module.

        The reads of a module: how often the two samples read that parameter of it which is read most.
        """
        every = [parameter for parameters in owned.values() for parameter in parameters]
        with require_gradients(every, []), torch.set_grad_enabled(bool(every)):
            outs = torch.cat([call_model(self.model, take_samples(probe, slice(i, i + 1))) for i in range(2)])
            total = weights @ outs @ direction
            found: Sequence[Tensor | None] = [None] * len(every)
            read = iter(count_reads(total, every))
            if total.requires_grad:
                found = torch.autograd.grad(total, every, allow_unused=True)
        squares = iter([0.0 if gradient is None else float(gradient.square().sum()) for gradient in found])
        norms = {module: sum(next(squares) for _ in parameters) for module, parameters in owned.items()}
        return outs.detach(), norms, {module: max(next(read) for _ in own) for module, own in owned.items()}

    def _bytes_per_sample(self, seen: tuple[list[Tap], dict[nn.Module, list[Call]]]) -> tuple[int, int]:
        """Bytes per sample: of the features, and of what is held while they are made.

        The gradients at hand are those of one direction; shares of all directions have the shapes of so many copies of it.
        Rules are applied to shapes alone, so that nothing is allocated; norms with running statistics need numbers, and their
        share grows with the directions.
        """
        taps, by_module = seen
        k, held = self.count, 0
        for module, calls in by_module.items():
            if module in self.fast:
                shares, copies = self._apply(module, [_shapes_only(call, k) for call in calls]), 1
                if shares is None:
                    shares, copies = self._apply(module, calls), k
                form = tuple(_held_form(share) for share in shares or [])
                if self.forms.setdefault(module, form) != form:
                    self.explicit.add(module)
                    self.forms[module] = (Rows,)
                held += copies * sum(_held_bytes(share) for share in shares or []) // 2
        rest = _bytes(self._rest()) * k
        touched = _bytes([tap.output for tap in taps]) // 2
        return max(held + rest, 1), (2 * k + 3) * touched + rest  # gradients, and a copy in another order

    def _describe_methods(self) -> tuple[str, ...]:
        names = {module: f"{name or 'model'} ({type(module).__name__})" for name, module in self.model.named_modules()}
        names |= {use: f"{use.name} (read by functions)" for use in self.uses}
        lines = [f"{names[module]}: {_form_text(self.forms.get(module))}" for module in self.fast]
        unserved = {id(parameter) for parameter in self._rest()}
        rest = [name for name, parameter in self.chosen.items() if id(parameter) in unserved]
        return tuple(lines + [f"{name}: one backward pass per sample" for name in rest] + ["mode: eval"])

    # --- features --------------------------------------------------------------------------------------------

    def _rest(self) -> list[nn.Parameter]:
        """Chosen parameters that no rule serves."""
        served = {id(p) for module, picked in self.fast.items() for p in own_parameters(module, picked)}
        return [parameter for parameter in self.chosen.values() if id(parameter) not in served]

    def _forward(self, x: Inputs) -> tuple[Tensor, list[Tap]]:
        """Output and taps, with channels innermost. A model that needs the plain layout (it may ask for views) gets that."""
        if not self.plain_layout:
            try:
                return forward_with_taps(self.model, channels_last(x), set(self.fast))
            except RuntimeError as error:
                if "view" not in str(error):
                    raise
                self.plain_layout = True
        return forward_with_taps(self.model, x, set(self.fast))

    def _forward_as_checked(self, x: Inputs) -> tuple[Tensor, list[Tap], bool]:
        """Output and taps, and whether entries may have moved; raises if the forward pass is not as it was checked.

        Parameters with a rule and inputs require gradients here, so that the graph shows every read of them: only calls of its
        module may read a parameter. The graph also tells whether a check of an earlier call still holds (``StaleCheck``).
        """
        owned = {module: own_parameters(module, picked) for module, picked in self.fast.items()}
        served = [parameter for own in owned.values() for parameter in own]
        given = self._follow_inputs(x)
        with require_gradients(served, []):
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Converting a tensor with requires_grad=True")
                    out, taps = self._forward(given)
            except RuntimeError:
                if not self.follow_inputs:
                    raise
                self.follow_inputs = False  # the model changes its input in place, or makes an array of it
                out, taps = self._forward(x)
        leaves: list[Tensor] = [*served]
        leaves += [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        facts = graph_facts(out, numbers, [tap.output.grad_fn for tap in taps])
        calls = Counter([tap.module for tap in taps])
        for module, own in owned.items():
            if max([facts.reads.get(id(parameter), 0) for parameter in own]) > calls[module]:
                raise RuleMismatch
        shapes = tuple([leaf.shape if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(x)])
        if not self.is_checked:
            self._graphs[shapes] = facts.signature
        elif self._graphs.get(shapes) != facts.signature or not self._is_apart(out.detach(), x):
            raise StaleCheck
        return out, taps, moves_entries(facts)

    def _follow_inputs(self, x: Inputs) -> Inputs:
        """Inputs that require gradients, where the model allows it."""
        if not self.follow_inputs:
            return x

        def follow(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            return (leaf.clone() if leaf.is_inference() else leaf.detach()).requires_grad_()

        laid_out = x if self.plain_layout else channels_last(x)
        return follow(laid_out) if isinstance(x, Tensor) else pytree.tree_map(follow, laid_out)

    def _is_apart(self, together: Tensor, x: Inputs) -> bool:
        """Whether the last sample has the same output in a batch of one."""
        n = len(together)
        with torch.no_grad():
            return self._are_equal(together[n - 1 :], call_model(self.model, take_samples(x, slice(n - 1, n))))

    def _calls(
        self, out: Tensor, taps: list[Tap], directions: Tensor, *, demote: bool, moved: bool | None = None
    ) -> dict[nn.Module, list[Call]]:
        """The calls of each module with a rule. A module whose calls lack one entry a sample loses its rule (``demote``) or
        raises ``RuleMismatch``. ``moved``: whether entries may stand in another order, which is then checked; ``None``: to be
        found out.
        """
        n = len(out)
        if demote:
            self._drop({tap.module for tap in taps if not tap.fits(n, folded=_may_be_folded(tap.module))})
            taps = [tap for tap in taps if tap.module in self.fast]
        elif not all(tap.fits(n, folded=tap.module in self.layouts) for tap in taps):
            raise RuleMismatch
        if moved is None and not demote:
            moved = moves_entries(graph_facts(out, {}, [tap.output.grad_fn for tap in taps]))
        batched = all(rule_for(module) in BATCHED for module in self.fast)
        try:
            entries = EntryCheck(out, taps, directions) if moved or demote else None
            found = tap_gradients(out, taps, directions, batched=batched)
        except CheckpointError as error:  # what is computed again in the backward pass was not seen
            raise RuleMismatch from error
        if demote and entries is not None:
            self._find_layouts(taps, found, entries)
        elif entries is not None:
            layouts = [self.layouts.get(tap.module) for tap in taps]
            if not all(
                entries.holds(i, each, layout) for i, (each, layout) in enumerate(zip(found, layouts, strict=True))
            ):
                raise RuleMismatch
        kept = [(tap, each) for tap, each in zip(taps, found, strict=True) if tap.module in self.fast]
        return calls_by_module([tap for tap, _ in kept], [each for _, each in kept], n, self.layouts)

    def _drop(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            del self.fast[module]

    def _find_layouts(self, taps: list[Tap], found: TapGradients, entries: EntryCheck) -> None:
        """Find how samples lie in the calls of dense layers; a layer where that cannot be told loses its rule."""
        numbers: dict[nn.Module, list[int]] = {}
        for number, tap in enumerate(taps):
            numbers.setdefault(tap.module, []).append(number)
        for module, own in numbers.items():
            if not _may_be_folded(module) or module in self.layouts:
                continue  # the rule itself is checked

            def fits(layout: int | None, own: list[int] = own) -> bool:
                return all(entries.holds(i, found[i], layout) for i in own)

            if all(taps[i].fits(entries.n, folded=False) for i in own) and (fits(None) or not fits(1)):
                continue
            fitting = [layout for layout in (0, 1) if fits(layout)]
            alike = all(taps[i].positions(entries.n) == 1 for i in own)
            if len(fitting) == 1 or (fitting and alike):
                self.layouts[module] = fitting[0]
            else:  # neither, or both: gradients of zero tell nothing
                del self.fast[module]

    def _apply(self, module: nn.Module, calls: list[Call]) -> list[Share] | None:
        """The shares of a module; ``None`` where its rule does not fit the calls."""
        rule = rule_for(module)
        assert rule is not None
        try:
            with torch.no_grad():
                shares = rule(calls, *self.fast[module])
                return [Rows(torch.cat(explicit_rows(shares), dim=-1))] if module in self.explicit else shares
        except (RuntimeError, ValueError, IndexError):
            return None

    def _shares(self, x: Inputs) -> Iterator[Share]:
        """Share after share; the activations of a layer are freed once its share is made."""
        by_module: dict[nn.Module, list[Call]] = {}
        if self.fast:
            out, taps, moved = self._forward_as_checked(x)
            by_module = self._calls(out, taps, self.directions, demote=False, moved=moved)
            del out, taps
        for module in self.fast:
            if (module in by_module) == (module in self.idle):
                raise RuleMismatch  # used by other samples than those it was checked on
        none = True
        for module in self.fast:
            if module in by_module:
                found = self._apply(module, by_module.pop(module))
                if found is None or tuple(map(_held_form, found)) != self.forms[module]:
                    raise RuleMismatch
                found = [_convert(share, self.dtype) for share in found]
                none = none and not found
                yield from found
                del found
        rest = self._rest()
        if rest or none:
            rows = rows_by_sample(self.model, x, rest, self.directions) if rest else None
            zero = torch.zeros(sample_count(x), len(self.directions), 1, dtype=self.dtype, device=self.device)
            yield Rows(zero if rows is None else rows.to(self.dtype))


def _may_be_folded(module: nn.Module) -> bool:
    """Whether a layer's rule knows calls in which samples are not simply the first axis."""
    return rule_for(module) in (linear_rule, weight_use_rule) and not isinstance(module, Affine)


def _shapes_only(call: Call, k: int) -> Call:
    """A call in ``k`` directions, as meta tensors: shapes without numbers."""
    gradient = call.gradient.to("meta")
    return Call(call.module, call.input.to("meta"), gradient.expand(k, *gradient.shape[1:]))


def _least_precise(tensors: Iterable[Any]) -> torch.dtype:
    """The least precise type of real numbers among these tensors."""
    kinds = {tensor.dtype for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_floating_point()}
    return max(kinds, key=lambda kind: torch.finfo(kind).eps)


def _convert(share: Share, dtype: torch.dtype) -> Share:
    """The share in ``dtype``, that of the output; a layer may compute in another one."""
    if all(tensor.dtype == dtype or not tensor.is_floating_point() for tensor in share.tensors()):
        return share
    return share.with_tensors([t.to(dtype) if t.is_floating_point() else t for t in share.tensors()])


def _form_text(form: Form | None) -> str:
    return "unused" if form is None else FORMS[form[0]] if form else "none"


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _is_held_as_rows(share: Share) -> TypeGuard[Windows | Products]:
    return isinstance(share, Products) or (isinstance(share, Windows) and share.rows_are_small())


def as_held(share: Share) -> Share:
    """A share in the form in which it is paired: filters as explicit rows where these are small, grouped ones always."""
    return Rows(share.rows()) if _is_held_as_rows(share) else share


def _held_form(share: Share) -> type[Share]:
    return Rows if _is_held_as_rows(share) else type(share)


def _held_bytes(share: Share) -> int:
    """What a share takes in the form in which it is held, without making it."""
    if _is_held_as_rows(share):
        first = share.tensors()[0]
        return len(first) * math.prod(share.row_shape) * first.element_size()
    return _bytes(share.tensors())


def _empty_share(share: Share, n: int, *, whole: bool) -> Share:
    """A share with empty tensors for the features of ``n`` samples; the share itself if it is of all samples."""
    if _is_held_as_rows(share):
        return Rows(share.tensors()[0].new_empty(n, *share.row_shape))
    if whole:
        return share
    return share.with_tensors([_empty_with_length(tensor, n) for tensor in share.tensors()])


def _empty_with_length(tensor: Tensor, n: int) -> Tensor:
    """An empty tensor for ``n`` samples in the same layout (channels may be innermost)."""
    order = sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True)
    made = tensor.new_empty(n, *(tensor.shape[axis] for axis in order))
    return made.permute(0, *(1 + order.index(axis) for axis in range(1, tensor.ndim)))


def _first_and_last(x: Inputs) -> Inputs:
    """The first and the last sample; a lone sample twice."""
    n = sample_count(x)
    if n == 1:
        return repeat_samples(x)
    first, last = take_samples(x, slice(0, 1)), take_samples(x, slice(n - 1, n))
    return pytree.tree_map(lambda a, b: torch.cat([a, b]) if isinstance(a, Tensor) else a, first, last)


@contextmanager
def matmul_precision(rough: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    if rough:
        torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
