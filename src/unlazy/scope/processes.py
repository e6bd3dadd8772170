"""Several processes: which of them measures, and how a model that FSDP2 shards over them is measured whole.

Data-parallel training keeps the whole network on every process. The first process measures it alone, and the scope sends nothing.

A model that ``torch.distributed.fsdp.fully_shard`` has sharded is whole on none of them. At a measurement all processes gather
its parameters, one at a time, in the training's own process group, and the first one copies them into a plain module that it
then measures by itself. Every measure works there as without shards, forward mode included.
"""

from __future__ import annotations

import copy
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from unlazy.kernels.gram import free_memory, size_text
from unlazy.runtime import InputError, require

MEETING_SECONDS = (
    60.0  # how long a process waits for the others before the scope gives up, far below a group's own timeout
)
ANNOUNCEMENT_SECONDS = 600.0  # how long it waits for the first one, which may be measuring
COPIES, COPY_SHARE = 2, 0.5  # whole copies that the first process holds, and the share of free memory they may take
GO, STOP = "go", "stop"
FSDP_HOOKS = "torch.distributed.fsdp"  # the module that its hooks come from
FSDP_STATE = "__composable_api_state_key"  # how attributes begin in which it keeps its state
HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
STATE_HOOK_DICTS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")

_scope_numbers = count()


def is_first_process() -> bool:
    """Whether this is the only process, or the first one of the default process group."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 (``fully_shard``) has sharded the model or a part of it."""
    return any(_is_fsdp_module(module) for module in model.modules())


def check_sharding(model: nn.Module) -> None:
    """Raise ``InputError`` if parameters are spread over processes in a way that a scope cannot gather."""
    old = [module for module in model.modules() if type(module).__name__ == "FullyShardedDataParallel"]
    require(
        not old,
        "FullyShardedDataParallel keeps parameters as pieces of one flat tensor, which a scope cannot measure; shard with "
        "torch.distributed.fsdp.fully_shard instead.",
    )
    parts = [name for name, p in model.named_parameters() if _is_dtensor(p)]
    require(
        not parts or is_sharded(model),
        f"{', '.join(parts[:3])} are distributed tensors without fully_shard, as tensor parallelism makes them; a scope "
        "measures plain modules and those that fully_shard has sharded.",
    )


class Meetings:
    """Agreement of several processes on when to do something together, through the store of their process group.

    They meet at step numbers that the first process announces. A meeting takes place if all processes come within
    ``MEETING_SECONDS``; otherwise none of them takes part, and no further meeting takes place. So a process that died, or a loop
    that reports its steps on one process only, stops the scope and never leaves a process alone in a collective.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        distributed = torch.distributed
        self.ranks, self.rank = sorted(ranks), distributed.get_rank()
        base = distributed.distributed_c10d._get_default_store()
        self._store = distributed.distributed_c10d.PrefixStore(f"unlazy/scope/{next(_scope_numbers)}", base)
        self.number, self._next_step, self._announced = 0, 0, True
        self.stopped: str | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process decides."""
        return self.rank == self.ranks[0]

    def is_due(self, step: int) -> bool:
        """Whether the next meeting is at this step, or should have been before it."""
        if self.stopped is None and not self._announced:
            word = self._wait_for_word(f"{self.number}/step", ANNOUNCEMENT_SECONDS)
            if word == STOP:
                self.stopped = "the first process stopped measuring"
            else:
                self._next_step, self._announced = int(word), True
        return self.stopped is None and step >= self._next_step

    def gather(self, refuse: str | None = None) -> bool:
        """Wait for all processes; returns whether all came. ``refuse``: why the first process calls the meeting off."""
        if self.stopped is not None:
            return False
        here = f"{self.number}/meeting"
        if not self.is_first:
            self._store.add(f"{here}/came", 1)
            if self._wait_for_word(here, MEETING_SECONDS) == STOP:
                self.stopped = "the first process did not come, or stopped measuring"
        elif refuse is not None or not self._wait_for_others(f"{here}/came"):
            self._store.compare_set(here, "", STOP)
            self.stopped = refuse or (
                f"not all processes came to a measurement within {MEETING_SECONDS:g} s. A sharded model is measured by all of "
                "them: make the scope and call scope.step and scope.finish on every process"
            )
        elif self._store.compare_set(here, "", GO).decode() != GO:
            self.stopped = "a process gave up waiting for this one"
        self.number += 1
        self._announced = False
        return self.stopped is None

    def announce(self, step: int | None) -> None:
        """The first process says at which step the next meeting is; ``None``: there is none."""
        if self.is_first and not self._announced:
            word = STOP if step is None else str(step)
            if self._store.compare_set(f"{self.number}/step", "", word).decode() != word:
                self.stopped = "a process gave up waiting for this one"
            self._next_step, self._announced = step or 0, True

    def stop(self, why: str) -> None:
        """Take part in no further meeting, and let the others know."""
        if self.stopped is None:
            self.stopped = why
            self.announce(None)
            self._store.compare_set(f"{self.number}/meeting", "", STOP)

    def _wait_for_others(self, key: str) -> bool:
        until, pause = time.monotonic() + MEETING_SECONDS, 2e-4
        while self._store.add(key, 0) < len(self.ranks) - 1:
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        return True

    def _wait_for_word(self, key: str, seconds: float) -> str:
        """What the first process set; ``STOP`` if it sets nothing, which it then finds itself."""
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:  # a store raises several kinds when time is up or its host is gone
            return str(self._store.compare_set(key, "", STOP).decode())
        return str(self._store.get(key).decode())


class ShardedModel:
    """A model sharded by FSDP2, and, on the first process, a plain whole ``copy`` of it that is measured in its place.

    ``before_update``: called on the first process before new values enter the copy.
    """

    def __init__(self, model: nn.Module) -> None:
        for module in model.modules():
            if _is_fsdp_module(module):
                module.reshard()  # type: ignore[operator]  # a pass without gradients may have left whole parameters registered
        self.model, self.shards = model, dict(model.named_parameters())
        meshes = {tuple(sorted(_mesh_ranks(p))) for p in self.shards.values() if _is_dtensor(p)}
        require(len(meshes) == 1, f"the model is sharded over {len(meshes)} sets of processes; a scope needs one.")
        self.meetings = Meetings(meshes.pop())
        self.copy: nn.Module | None = None
        self.before_update: Callable[[], None] | None = None
        self._gathered = -1

    @property
    def is_first(self) -> bool:
        """Whether this process measures."""
        return self.meetings.is_first

    @property
    def is_current(self) -> bool:
        """Whether the copy holds the values that the parameters have now."""
        return self._gathered == self.updates()

    def updates(self) -> int:
        """A number that grows whenever a parameter is written to."""
        return sum(p._version for p in self.shards.values())

    def begin(self) -> bool:
        """Make the copy, on the first process; returns whether all processes came."""
        needed = COPIES * sum(p.numel() * p.element_size() for p in self.shards.values())
        free, refuse = _free_bytes(next(iter(self.shards.values())).device), None
        if self.is_first and needed > COPY_SHARE * free:
            refuse = (
                f"a whole copy of the sharded model and of its start take {size_text(needed)}, more than half of the "
                f"{size_text(int(free))} that are free"
            )
        if not self.meetings.gather(refuse):
            return False
        if self.is_first:
            self.copy = plain_copy(self.model)
        self._update()
        return True

    def meet(self, step: int = sys.maxsize) -> bool:
        """Gather the parameters if a meeting is due at this step, by default in any case; returns whether that was done."""
        if not self.meetings.is_due(step) or not self.meetings.gather():
            return False
        self._update()
        return True

    def _update(self) -> None:
        """All processes: gather one parameter at a time. The first one: write it into the copy."""
        own = {} if self.copy is None else dict(self.copy.named_parameters())
        for name, mine in own.items():
            mine.requires_grad_(self.shards[name].requires_grad)
        if self.before_update is not None:
            self.before_update()
        with torch.no_grad():
            for name, shard in self.shards.items():
                whole: Tensor = shard.full_tensor() if _is_dtensor(shard) else shard  # type: ignore[attr-defined]
                if name in own:
                    own[name].copy_(whole)
            if self.copy is not None:
                for kept, now in zip(self.copy.buffers(), self.model.buffers(), strict=True):
                    kept.copy_(now)
        self._gathered = self.updates()


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy of a model sharded by FSDP2 with whole parameters (of no particular values) and without the hooks of FSDP2."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        whole = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        memo[id(p)] = nn.Parameter(whole, requires_grad=p.requires_grad)
    made = dict[nn.Module, nn.Module]()
    for module in model.modules():
        for name in (*HOOK_DICTS, *STATE_HOOK_DICTS):  # shared, not copied: a hook may belong to a whole training
            hooks = getattr(module, name)
            memo[id(hooks)] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_fsdp_hook(hook))
        if _is_fsdp_module(module):
            plain: Any = type(module).__mro__[type(module)._orig_cls_mro_index]  # type: ignore[attr-defined]
            made[module] = memo[id(module)] = plain.__new__(plain)
    try:
        for module, new in made.items():
            kept = {name: value for name, value in module.__dict__.items() if not str(name).startswith(FSDP_STATE)}
            new.__dict__.update({name: copy.deepcopy(value, memo) for name, value in kept.items()})
        whole_model: nn.Module = copy.deepcopy(model, memo)
    except Exception as error:  # whatever a stranger's attributes raise
        raise InputError(
            f"the sharded model cannot be copied to measure it: {error}. Keep process groups and open files out of it."
        ) from error
    return whole_model


def _is_fsdp_module(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _is_dtensor(tensor: Tensor) -> bool:
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(tensor, known.DTensor)


def _mesh_ranks(shard: Any) -> list[int]:
    return list(map(int, shard.device_mesh.mesh.flatten().tolist()))


def _is_fsdp_hook(hook: Any) -> bool:
    plain = getattr(hook, "hook", hook)  # those of state dicts are wrapped
    return str(getattr(plain, "__module__", "")).startswith(FSDP_HOOKS)


def _free_bytes(device: torch.device) -> float:
    return float(torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory())
