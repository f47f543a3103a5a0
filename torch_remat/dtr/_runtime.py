"""The runtime of a block: a dispatch mode below autograd that runs each op, records it, and keeps to the budget.

In: the ops of the program, forward and backward. Kept: `Memory`, and a weak reference to each tensor of the program.
Out: `EvictableTensor`s, whose ops can run again; plain tensors where the program must have them (gradients of leaves,
views of what the block did not make); errors. When the block ends, all its tensors become plain.

NOTE [What becomes of an op]
1. A view of a tensor of the block needs no data: torch makes it of the metadata, and it aliases the same buffer.
2. An op that computes runs on resident inputs and is recorded; its results are new storages.
3. An op that writes tensors of the block makes the next version of their storages from a copy, or from their own
   memory where the old version can be recomputed.
4. A write to a tensor that the block did not make happens once. Recorded ops that read the tensor get a copy of what
   it was, or their results are pinned: what takes fewer bytes.
5. Results of what must not run twice are pinned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from threading import get_ident
from time import perf_counter
from typing import Any
from weakref import ref

import optree
import torch

from torch_remat._compat import (
    DispatchMode,
    below_autograd,
    current_node,
    graph_task,
    make_subclass,
    storage_key,
    without_dispatch_modes,
)
from torch_remat.dispatch.ops.schema import argument
from torch_remat.dtr._block_memory import BlockMemory
from torch_remat.dtr._leaving import make_plain, value_of
from torch_remat.dtr._ops import (
    NO_ROOTS,
    Const,
    Found,
    Kind,
    Known,
    Look,
    Op,
    adds_many,
    bytes_on_meta,
    generators,
    kind_of,
    known_of,
    leaves,
    look_of,
    of_metadata,
    refilled,
)
from torch_remat.dtr._pool import ScanPool
from torch_remat.dtr._ranks import refuse_op, refuse_type
from torch_remat.dtr._recorder import Recorder
from torch_remat.dtr._storage import Alias, Buffer, Handle, Version, copy_memory, derive, place_of
from torch_remat.dtr._tensor import EvictableTensor, SavedTensor, make_tensor, not_active
from torch_remat.errors import RematError

_OURS = frozenset((EvictableTensor, SavedTensor, torch.Tensor, torch.nn.Parameter))
_DETACH = torch.ops.aten.detach.default
_MOST_INPUTS = 8  # of writes in a row; what needs more to be recomputed is pinned, as gradients of shared weights are
_GRADIENT = "the gradient of a leaf"
_TINY = 8  # bytes of what is pinned: a loss gains nothing by eviction, and would keep all that it depends on known


def _at_plain_leaf() -> bool:
    node: Any = current_node()
    if node is None or node.name() != "torch::autograd::AccumulateGrad":
        return False
    return type(node.variable) is not EvictableTensor


class BlockRuntime(DispatchMode):
    """Runs the ops of one block; see `budget`."""

    def __init__(self, memory: BlockMemory) -> None:
        super().__init__()
        self.memory = memory
        self.dropped: deque[Handle] = deque()
        self.tensors: dict[int, ref[EvictableTensor]] = {}  # by id of the handle
        self.thread = get_ident()
        self.recorder: Recorder | None = None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op."""
        if self.dropped:
            self.forget()
        kwargs = kwargs or {}
        for form in types:
            if form is not EvictableTensor and form not in _OURS:
                refuse_type(form)
                return NotImplemented  # another subclass takes it apart first, under this mode
        kind = kind_of(func)
        gradient = kind.accumulates and graph_task() >= 0 and _at_plain_leaf()
        if kind.reshapes:
            return self.reshape(func, args, kwargs)
        if kind.view and not (gradient and not kind.written):
            if type(args[0]) is EvictableTensor:
                return self.view(func, args, kwargs)
            result = func(*args, **kwargs)
            if kind.lifts:
                self.memory.count(result, "made of Python values")
            return result
        if kind.once:
            refuse_op(kind.name, args)
            return self.once(kind, func, args, kwargs)
        if kind.written:
            return self.write(kind, func, args, kwargs)
        return self.compute(kind, func, args, kwargs, gradient)

    def forget(self) -> None:
        """Free what the program has let go of since the last op."""
        while self.dropped:
            handle = self.dropped.popleft()
            self.tensors.pop(id(handle), None)
            if self.recorder is not None:
                self.recorder.released(handle)
            buffer = handle.buffer
            buffer.handles -= 1
            if not buffer.handles:
                buffer.storage.names = 0
                self.memory.release(buffer.storage)

    def view(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make views of a tensor of the block, without its data."""
        base: EvictableTensor = args[0]
        self._own(base)
        if func is not _DETACH:
            base._handle.used = True
        with without_dispatch_modes():
            result = func(*args, **kwargs)
        buffer = base._handle.buffer
        made = [self._alias(buffer, leaf) for leaf in leaves(result)]
        if self.recorder is not None:
            found = Found(kind_of(func))
            found.tensors = [base]
            self.recorder.ran(kind_of(func), found, made)
        return made[0] if isinstance(result, torch.Tensor) else refilled(result, iter(made))

    def reshape(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op that changes only the place of its tensor in its storage."""
        tensor = args[0]
        if type(tensor) is not EvictableTensor:
            return func(*args, **kwargs)
        self._own(tensor)
        with without_dispatch_modes():
            func(*args, **kwargs)
        tensor._handle.move(tensor, look_of(tensor))
        return tensor

    def compute(
        self, kind: Kind, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], gradient: bool = False
    ) -> Any:
        """Run and record an op that makes new tensors and does nothing else.

        With ``gradient`` autograd makes the gradient of a leaf from outside: it is plain, and nothing is recorded.
        """
        if kind.factory and type(args[0]) is EvictableTensor:
            args, kwargs = of_metadata(args, kwargs)
        op, found = self._record(kind, func, args, kwargs)
        known, memory = op.known, self.memory
        if found.ready and not gradient and 0 <= known.bytes <= memory.limit - memory.live:
            result, cost, _ = self._run(op, NO_ROOTS)
            made = self._results(op, result, found, cost)
        else:
            with memory.held(found.inputs):
                self._reserve(op, known.bytes < 0)
                result, cost, _ = self._run(op, NO_ROOTS)
                made = self._hand(op, result) if gradient else self._results(op, result, found, cost)
        if self.recorder is not None:
            self.recorder.ran(kind, found, made, cost)
        return made

    def write(self, kind: Kind, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op that writes to arguments: to new versions of the block's, to others themselves."""
        trains = kind.training is not None and (kind.training < 0 or args[kind.training])
        targets: list[torch.Tensor] = []
        if kind.training is None or trains:
            for where in kind.written:
                targets += [leaf for leaf in leaves(argument(where, args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not targets:
            return self.compute(kind, func, args, kwargs)
        memory = self.memory
        op, found = self._record(kind, func, args, kwargs)
        op.written = tuple({t._handle.buffer.storage: None for t in targets if type(t) is EvictableTensor})
        outside = [target for target in targets if type(target) is not EvictableTensor]
        with memory.held(found.inputs):
            for target in outside:
                memory.before_write(target)
            why = self._of_gradients(found) or next((one.pin for one in op.written if one.op is None), "")
            if outside and not trains:
                why = f"made by {op.name}, which wrote to a tensor created outside the block"
            self._reserve(op, op.known.bytes < 0 and -1 in kind.returned)
            with memory.to_write(op.written, kind.name) as roots:
                result, cost, given = self._run(op, roots)
                self._next_versions(op, roots, targets, cost, why)
            passed = [argument(where, args, kwargs) for where in kind.written]
            for tensors, values in zip(passed, (argument(where, *given) for where in kind.written), strict=True):
                for tensor, value in zip(leaves(tensors), leaves(values), strict=True):
                    if type(tensor) is EvictableTensor:
                        self._follow(tensor, value, kind)
            if trains:
                for at in (3, 4):
                    if type(const := op.args[at]) is Const:  # a second run writes its statistics somewhere else
                        op.args[at] = look_of(const.tensor)
                        op.consts = [one for one in op.consts if one is not const]
            returned = kind.returned if type(result) is not tuple or len(result) == len(kind.returned) else ()
            made = self._results(op, result, found, cost, [passed[at] if at >= 0 else None for at in returned], why)
        if self.recorder is not None:
            self.recorder.ran(kind, found, made, cost, targets)
        return made

    def _record(self, kind: Kind, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Op, Found]:
        """Return an op with what it keeps of its arguments, and those taken apart."""
        found, take = Found(kind), self._take
        recorded = [take(value, found) for value in args]
        named = {name: take(value, found) for name, value in kwargs.items()} if kwargs else {}
        if named:
            found.key += named
        op = Op(kind, func, recorded, named, tuple(found.inputs), known_of(tuple(found.key)))
        op.consts = found.consts
        return op, found

    def _reserve(self, op: Op, unknown: bool) -> None:
        """Make room for what an op makes; where that is unknown a run without data shows it."""
        known = op.known
        if unknown:
            known.bytes = 0 if op.kind.view else bytes_on_meta(op.func, *op.given(NO_ROOTS))
        self.memory.reserve(max(known.bytes, 0), op.name)

    def _run(self, op: Op, roots: Mapping[Version, torch.Tensor]) -> tuple[Any, float, tuple[Any, Any]]:
        """Run an op for the first time; return its result, its cost, and the arguments that it got."""
        kind, known, costs = op.kind, op.known, self.memory.costs
        args, kwargs = given = op.given(roots)
        random = generators(args, kwargs) if kind.random else None
        start = perf_counter()
        result = op.func(*args, **kwargs)
        known.took(perf_counter() - start)
        if random is not None and random.keep_drawn():
            op.random = random
        if kind.view:
            return result, 0.0, given
        cost = known.cost if costs.measured else costs.of(known, op.func, args, kwargs, result)
        self.memory.clock += cost
        return result, cost, given

    def _hand(self, op: Op, result: Any) -> Any:
        """Return the gradient of a leaf, which is new, or a storage of the block that recorded ops do not read."""
        if result.layout is not torch.strided:
            return result
        if op.kind.view and op.inputs:
            storage = op.inputs[0]
            if storage.is_read:
                result = copy_memory(result)
            else:
                self.memory.pin(storage, _GRADIENT)
                self.memory.grow(-storage.size_bytes)
                storage.size_bytes = 0
        self.memory.count(result, _GRADIENT)
        return result

    def _of_gradients(self, found: Found) -> str:
        """Return why an op must not run again that read the gradient of a leaf, empty if it did not."""
        plain = self.memory.plain
        if any(const.address in plain for const in found.consts) or any(one.pin == _GRADIENT for one in found.inputs):
            return "made from the gradient of a leaf"
        return ""

    def _next_versions(
        self,
        op: Op,
        roots: Mapping[Version, torch.Tensor],
        targets: Sequence[torch.Tensor],
        cost: float,
        why: str,
    ) -> None:
        """Move the buffers of the written storages on to what the op made of them."""
        buffers = {t._handle.buffer.storage: t._handle.buffer for t in targets if type(t) is EvictableTensor}
        alone = not why and -1 not in op.kind.returned
        for old, root in roots.items():
            if old.op is None and root is old.tensor:
                continue  # pinned, and written where it is
            new = Version(root, root.untyped_storage().nbytes(), cost, self.memory.clock, why)
            if alone and root is old.tensor and op.absorb(old):
                new.cost += old.cost
                if len(op.inputs) > _MOST_INPUTS:
                    new.pin = "a sum of many terms"
                else:
                    self.memory.link(op, new)
                old.names = old.locks = 0  # its memory and its op go on as a part of the next version
                self.memory.remove([old])
            else:
                if not why:
                    self.memory.link(op, new)
                if root is old.tensor:
                    self.memory.evict(old)
            buffers[old].storage = new
            self.memory.born(new)
            if old.names:
                old.names = 0
                self.memory.release(old)

    def _follow(self, tensor: EvictableTensor, value: torch.Tensor, kind: Kind) -> None:
        """Give a tensor the shape that an op has given its value, as ``out=`` and ``resize_`` do."""
        if value.shape == tensor.shape and value.stride() == tensor.stride():
            return
        root = tensor._handle.buffer.storage.tensor
        if root is None or storage_key(root) != storage_key(value):
            raise RematError(
                f"{kind.name} would give a tensor of a budget's block the memory of another one",
                remedy="Use the other tensor itself, or copy_ its values.",
            )
        with without_dispatch_modes():
            tensor.data = make_tensor(value)
        tensor._handle.move(value, look_of(value))

    def once(self, kind: Kind, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op that must not run twice, and may write whatever it gets."""
        found = Found(kind)
        everything: Any = (tuple(args), dict(kwargs))
        tensors = [leaf for leaf in optree.tree_leaves(everything) if type(leaf) is EvictableTensor]
        for tensor in tensors:
            self._own(tensor)
        found.inputs = [tensor._handle.buffer.storage for tensor in tensors]
        with self.memory.held(found.inputs):
            for tensor in tensors:
                self._settle(tensor._handle.buffer, f"given to {kind.name}, which must not run twice")
            values: Any = optree.tree_map(
                lambda leaf: value_of(leaf) if type(leaf) is EvictableTensor else leaf, everything
            )
            result = func(*values[0], **values[1])
        op = Op(kind, func, [], {}, (), Known())
        return self._results(op, result, found, 0.0, (), f"made by {kind.name}, which must not run twice")

    def _settle(self, buffer: Buffer, why: str) -> None:
        """Pin the present version of a buffer where it is; one that recorded ops read becomes a version of its own."""
        storage = buffer.storage
        if storage.is_read:
            self.memory.reserve(storage.size_bytes, why)
            new = Version(copy_memory(storage.data()), storage.size_bytes, 0.0, self.memory.clock, why)
            buffer.storage = new
            self.memory.born(new)
            storage.names = 0
        else:
            self.memory.pin(storage, why)

    def read(self, tensor: torch.Tensor, reader: str, *, share: bool) -> torch.Tensor:
        """Return a plain tensor with the data of one of the block's; one that is shared stays where it is."""
        assert type(tensor) is EvictableTensor
        if get_ident() != self.thread:
            raise not_active(reader)
        storage = tensor._handle.buffer.storage
        with without_dispatch_modes(), below_autograd(), self.memory.held([storage]):
            if share:
                self.memory.pin(storage, f"shared with the reader of {reader}")
            return derive(value_of(tensor), place_of(tensor))

    def evict_all(self, tensors: Iterable[EvictableTensor]) -> None:
        """Evict the data of some tensors that can be recomputed."""
        self.forget()
        for tensor in tensors:
            storage = tensor._handle.buffer.storage
            if storage.tensor is not None and storage.op is not None and not storage.locks:
                self.memory.evict(storage)

    def close(self) -> BaseException | None:
        """Make all tensors of the block plain and forget everything; return the first error on the way."""
        memory = self.memory
        memory.soft = True
        failure: BaseException | None = None
        for _ in range(2):  # an interrupt must not leave anything behind
            try:
                self.forget()
                alive = [weak() for weak in list(self.tensors.values())]
                leaving: list[torch.Tensor] = [tensor for tensor in alive if tensor is not None]
                failure = make_plain(memory, leaving) or failure
                break
            except BaseException as error:
                failure = failure or error
        self.thread = 0  # of nobody
        for storage in memory.storages:
            storage.op = None
            storage.children.clear()
            storage.note = None
        memory.storages.clear()
        memory.plain.clear()
        memory.pool = ScanPool(memory.heuristic)
        memory.readers.clear()
        self.tensors.clear()
        self.dropped.clear()
        return failure

    # Arguments and results

    def _own(self, tensor: EvictableTensor) -> None:
        if tensor._handle.buffer.owner is not self:
            raise not_active("an op")

    def _take(self, value: Any, found: Found) -> Any:
        """Return what a recorded op keeps of an argument."""
        form = type(value)
        if form is EvictableTensor:
            handle = value._handle
            if handle.buffer.owner is not self:
                raise not_active("an op")
            handle.used = True
            storage = handle.buffer.storage
            found.tensors.append(value)
            found.key.append(handle.look)
            if storage not in found.inputs:
                found.inputs.append(storage)
                if storage.tensor is None:
                    found.ready = False
            return storage if handle.place is None else Alias(storage, handle.place)
        if isinstance(value, torch.Tensor):
            const = Const(value)
            found.consts.append(const)
            found.key.append(look_of(value))
            return const
        if form is list or form is tuple:
            found.key.append(len(value))
            return form([self._take(part, found) for part in value])
        # A generator is no part of what is known of an op, and what is known must not keep one alive.
        found.key.append(value if form is int or value is None else (form, None if form is torch.Generator else value))
        return value

    def _results(
        self, op: Op, result: Any, found: Found, cost: float, passed: Sequence[Any] = (), pin: str = ""
    ) -> Any:
        """Make tensors of the block of an op's results, and record the op.

        ``passed`` says for each part of the result which written argument it is, if any; ``pin`` why the op must not
        run again, empty if it may.
        """
        memory = self.memory
        clock = memory.clock
        changed = memory.heuristic.changed
        for storage in found.inputs:
            storage.last_access = clock
            if changed is not None and storage.place >= 0:
                changed.add(storage.place)
        if not pin:
            pin = self._of_gradients(found) if memory.plain else ""
            if op.kind.adds and graph_task() >= 0 and adds_many(op):
                pin = "a sum of many gradients"
        known = op.known
        if type(result) is torch.Tensor and not passed and not known.aliases and known.outputs and not pin:
            size, look = known.outputs[0]
            if (
                size > _TINY
                and look.shape == result.shape
                and look.stride == result.stride()
                and look.dtype is result.dtype
            ):
                made = self._new(op, result, size, look, cost)
                memory.watch(op)
                return made
        return self._any_results(op, result, found, cost, passed, pin)

    def _any_results(self, op: Op, result: Any, found: Found, cost: float, passed: Sequence[Any], pin: str) -> Any:
        known = op.known
        buffers: dict[int, Buffer | None] = {const.address: None for const in found.consts}
        for tensor in found.tensors:
            root = tensor._handle.buffer.storage.tensor
            if root is not None:
                buffers[storage_key(root)] = tensor._handle.buffer
        made: list[Any] = []
        fresh: list[bool] = []
        outputs: list[tuple[int, Look]] = []
        for at, leaf in enumerate(leaves(result)):
            fresh.append(False)
            if at < len(passed) and passed[at] is not None:
                made.append(passed[at])
                continue
            if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
                made.append(leaf)
                continue
            address = storage_key(leaf)
            if address in buffers:
                known.aliases = True
                buffer = buffers[address]
                made.append(leaf if buffer is None else self._alias(buffer, leaf))
                continue
            fresh[-1] = True
            size, look = leaf.untyped_storage().nbytes(), look_of(leaf)
            made.append(self._new(op, leaf, size, look, cost, pin or ("too small to evict" if size <= _TINY else "")))
            buffers[address] = made[-1]._handle.buffer
            outputs.append((size, look))
        known.bytes = sum(size for size, _ in outputs)
        known.outputs = outputs
        op.fresh = fresh
        if op.alive:
            self.memory.watch(op)
        if isinstance(result, (tuple, list)):
            return refilled(result, iter(made))
        return made[0]

    def _new(self, op: Op, leaf: torch.Tensor, size: int, look: Look, cost: float, pin: str = "") -> EvictableTensor:
        """Return a tensor of the block for a new result."""
        storage = Version(leaf, size, cost, self.memory.clock, pin)
        if pin:
            op.outputs.append(None)
        else:
            self.memory.link(op, storage)
        self.memory.born(storage)
        made: EvictableTensor = make_tensor(leaf)
        handle = made._handle = Handle(Buffer(storage, self), None, look)
        self.tensors[id(handle)] = ref(made)
        return made

    def _alias(self, buffer: Buffer, like: torch.Tensor) -> EvictableTensor:
        """Return a tensor that has the place in a buffer that another one has."""
        made: EvictableTensor = make_subclass(EvictableTensor, like)
        handle = made._handle = Handle(buffer, place_of(like), look_of(like))
        self.tensors[id(handle)] = ref(made)
        return made
