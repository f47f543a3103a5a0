"""The ranks that agree: what a budget with a group asks of `torch.distributed`.

In: numbers of this rank, and word that its block has failed. Kept: the group, or the groups of a mesh. Out: the most of
each number over the ranks, the same on all of them.

NOTE [ Ranks that raise ]
A rank whose block has failed starts no collective: the others may be inside of one of their own, with which it would be
matched. It leaves word in the store of `torch.distributed`. Who waits for the ranks looks there now and then.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_remat._compat import accelerator_type, default_store, without_dispatch_modes
from torch_remat.errors import RematError, RematWarning, UsageError, user_line

_SPIN_SECONDS = 0.002
"""For so long it is looked again and again whether all ranks have come."""
_LOOK_SECONDS = 0.2
"""How often a rank checks whether another one has reported an error."""
PATIENCE_SECONDS = 30.0
"""After so long a warning says what is waited for."""
_budgets: Counter[str] = Counter()  # by ranks: how many budgets there were, in the same order on each of them


class Ranks:
    """The ranks of a group or of a mesh.

    Args:
        group: A `torch.distributed.ProcessGroup` or a `DeviceMesh`.

    Raises:
        UsageError: It is neither, or this process is not in it.
    """

    def __init__(self, group: Any) -> None:
        form = "group= is a process group or a device mesh that this rank is in, of those that share collectives."
        if isinstance(group, DeviceMesh):
            self._groups, members = group.get_all_groups(), group.mesh.flatten().tolist()
        elif isinstance(group, dist.ProcessGroup):
            self._groups, members = [group], dist.get_process_group_ranks(group)
        else:
            raise UsageError(f"budget(group=...) takes no {type(group).__name__}", remedy=form)
        self.rank = dist.get_rank()
        if self.rank not in members:
            raise UsageError(f"budget(group=...): rank {self.rank} is not in the group", remedy=form)
        name = sha256(repr(sorted(members)).encode()).hexdigest()[:16]
        _budgets[name] += 1
        self._prefix = f"torch_remat/budget/{name}/{_budgets[name]}"
        self.world = dist.get_world_size(), tuple((one.group_desc, one.size()) for one in self._groups)
        self._device = torch.device("cpu")
        if not all("cpu:" in dist.get_backend_config(one) for one in self._groups):
            self._device = torch.device(accelerator_type(), torch.accelerator.current_device_index())
        self._warned = False

    def most(self, numbers: Sequence[float], blocks: Sequence[int]) -> list[float]:
        """Return the most of each number over all ranks.

        Args:
            numbers: As many on each rank.
            blocks: The failure of a rank in one of these blocks ends the wait.

        Raises:
            RematError: A rank has failed.
        """
        with without_dispatch_modes(), torch.no_grad():
            tensor = torch.tensor(numbers, dtype=torch.float64, device=self._device)
            for group in self._groups:
                work: Any = dist.all_reduce(tensor, dist.ReduceOp.MAX, group, async_op=True)
                try:
                    self._wait(work, blocks)
                    work.wait()
                except RematError:
                    raise
                except RuntimeError:
                    self._raise_if_failed(blocks)  # which is why the connection is gone
                    raise
            found: list[float] = tensor.tolist()
        return found

    def all_of(self, value: Any) -> dict[int, Any]:
        """Return a value of each rank, by rank."""
        known = {self.rank: value}
        with without_dispatch_modes(), torch.no_grad():
            for group in self._groups:
                parts: list[Any] = [None] * group.size()
                dist.all_gather_object(parts, known, group)
                for part in parts:
                    known.update(part)
        return dict(sorted(known.items()))

    def leave_word(self, block: int, kind: type[BaseException]) -> None:
        """Tell the others that this rank's block has failed."""
        with suppress(Exception):  # the store may be gone, with the process that has it
            default_store().set(f"{self._prefix}/{block}", f"rank {self.rank} raised {kind.__name__}")

    def _wait(self, work: Any, blocks: Sequence[int]) -> None:
        begin = look = monotonic()
        failed = 0.0
        while not work.is_completed():
            now = monotonic()
            if failed and now > failed + _LOOK_SECONDS:
                self._raise_if_failed(blocks)
            elif now >= look and not failed:
                # A rank may have failed after this: then what it has sent is on its way.
                failed = now if self._failed(blocks) else 0.0
                look = now + _LOOK_SECONDS
            if now - begin > PATIENCE_SECONDS and not self._warned:
                self._warned = True
                text = f"a budget has waited for other ranks for {PATIENCE_SECONDS:.0f} s: they run no region in it"
                warnings.warn_explicit(text, RematWarning, *user_line())
            if now - begin > _SPIN_SECONDS:
                sleep(_SPIN_SECONDS)

    def _failed(self, blocks: Sequence[int]) -> str:
        """Return the word that a rank has left; empty if none has."""
        store = default_store()
        keys = [f"{self._prefix}/{block}" for block in blocks]
        return next((store.get(key).decode() for key in keys if store.check([key])), "")

    def _raise_if_failed(self, blocks: Sequence[int]) -> None:
        if word := self._failed(blocks):
            raise RematError(
                f"{word} in a block of this budget, so the ranks no longer agree",
                remedy="That rank's traceback shows why. Collectives may be under way: end all processes.",
            )
