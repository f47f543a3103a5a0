"""A slow, obvious simulator straight from the rules, to hold the library's against; of it it shares the log alone.

It scans every list, searches neighbourhoods anew for every score, relabels components one storage at a time, and
recurses.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

from torch_remat.dtr import Log
from torch_remat.dtr.log import Step


class Thing(SimpleNamespace):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class RanOut(Exception):
    pass


class Stopped(Exception):
    pass


@dataclasses.dataclass
class Figures:
    """What a run is compared by."""

    base_compute: float
    total_compute: float = 0
    evictions: int = 0
    rematerializations: int = 0
    peak_bytes: int = 0
    ran_out: bool = False
    stopped: bool = False


class Reference:
    def __init__(self, log: Log, budget, heuristic, deallocation="eager", max_overhead=2.0):
        self.log, self.budget, self.heuristic, self.deallocation = log, budget, heuristic, deallocation
        self.figures = Figures(log.base_compute)
        self.most_again = (max_overhead - 1) * log.base_compute
        self.clock = self.again = self.used = 0
        self.pool = []  # evictable storages, in the order in which they became so
        self.label, self.sums = {}, {}  # dtr_eq: component of each evicted storage; sum of each component
        fresh = {"pinned": False, "resident": False, "gone": False, "last": 0, "locks": 0, "names": 0}
        self.storages = [Thing(size=size, **fresh) for size in log.sizes_bytes]
        self.ops = [Thing(cost=op.cost, inputs=op.inputs, outputs=op.outputs) for op in log.ops]
        self.tensors = [
            Thing(
                storage=self.storages[at],
                op=self.ops[op] if op >= 0 else None,
                root=not view,
                defined=False,
                made=False,
            )
            for at, op, view in zip(log.storage_of, log.op_of, log.view, strict=True)
        ]
        for op in self.ops:
            op.inputs, op.outputs = ([self.tensors[at] for at in part] for part in (op.inputs, op.outputs))

    def run(self):
        try:
            for step, number in self.log.steps:
                self.take(step, number)
            for number in self.log.named:
                tensor = self.tensors[number]
                self.materialize(tensor)
                tensor.storage.pinned = True
                self.refill(tensor.storage)
        except RanOut:
            self.figures.ran_out = True
        except Stopped:
            self.figures.stopped = True
        self.figures.total_compute = self.clock
        return dataclasses.asdict(self.figures)

    def take(self, step, number):
        if step is Step.RUN:
            for tensor in self.ops[number].outputs:
                tensor.storage.names += 1
            self.run_op(self.ops[number], first=True)
            return
        tensor, storage = self.tensors[number], self.tensors[number].storage
        storage.names += -1 if step is Step.DROP else 1
        if step is Step.CONSTANT:
            self.make_room(storage.size)
            self.charge(storage.size)
            storage.pinned = storage.resident = tensor.defined = tensor.made = True
            storage.last = self.clock
        if step is Step.DROP and not storage.names:
            if self.deallocation == "eager" and storage.resident and not storage.pinned:
                self.evict(storage)
            if self.deallocation == "banish":
                self.banish_all()

    # Ops.

    def materialize(self, tensor):
        if not tensor.defined:
            self.run_op(tensor.op, first=False)

    def run_op(self, op, first):
        for tensor in op.inputs:
            tensor.storage.last = self.clock
        defined_before = [tensor.defined for tensor in op.inputs]
        for tensor, defined in zip(op.inputs, defined_before, strict=True):
            if defined:
                self.lock(tensor.storage)
        for tensor, defined in zip(op.inputs, defined_before, strict=True):
            if not defined:
                self.materialize(tensor)
                self.lock(tensor.storage)
        size = sum(tensor.storage.size for tensor in op.outputs if tensor.root)
        self.make_room(size)
        self.charge(size)
        self.clock += op.cost
        if not first:
            self.figures.rematerializations += 1
            self.again += op.cost
        for tensor in op.outputs:
            self.fill(tensor, first)
        for tensor in op.inputs:
            tensor.storage.locks -= 1
            self.refill(tensor.storage)
            if self.deallocation == "banish":
                self.banish_all()
        if self.again > self.most_again:
            raise Stopped

    def fill(self, tensor, first):
        storage = tensor.storage
        if tensor.root and (storage.gone or storage.resident):
            self.used -= storage.size
        if storage.gone:
            return
        came_back = not first and not storage.resident
        storage.resident = tensor.defined = tensor.made = True
        if first:
            storage.last = self.clock
        if came_back and self.heuristic == "dtr_eq":
            self.sums[self.label.pop(storage)] -= self.cost(storage)
        self.refill(storage)

    def lock(self, storage):
        storage.locks += 1
        self.refill(storage)

    def refill(self, storage):
        evictable = storage.resident and not storage.locks and not storage.pinned and not storage.gone
        if evictable and storage not in self.pool:
            self.pool.append(storage)
        elif storage in self.pool and not evictable:
            self.pool.remove(storage)

    def charge(self, size):
        self.used += size
        self.figures.peak_bytes = max(self.figures.peak_bytes, self.used)

    def make_room(self, size):
        while self.used + size > self.budget:
            chosen, least = None, math.inf
            for storage in self.pool:
                score = self.score(storage)
                if score <= least:
                    chosen, least = storage, score
                if score == 0:
                    break
            if chosen is None:
                raise RanOut
            self.figures.evictions += 1
            self.evict(chosen)

    def evict(self, storage):
        storage.resident = False
        self.used -= storage.size
        for tensor in self.tensors:
            if tensor.storage is storage:
                tensor.defined = False
        self.refill(storage)
        if self.heuristic == "dtr_eq":
            near = {self.label[one] for one in self.near(storage) if one in self.label}
            made = len(self.sums)
            self.sums[made] = self.cost(storage) + sum(self.sums[label] for label in near)
            self.label = {one: made if label in near else label for one, label in self.label.items()}
            self.label[storage] = made

    def banish_all(self):
        changed = True
        while changed:
            changed = False
            for storage in self.storages:
                if self.banishable(storage):
                    children = self.downwards(storage)
                    if not storage.resident and self.heuristic == "dtr_eq":
                        self.sums[self.label.pop(storage)] -= self.cost(storage)
                    if storage.resident:
                        self.used -= storage.size
                    storage.gone, storage.resident = True, False
                    self.refill(storage)
                    for child in children:
                        child.pinned = True
                        self.refill(child)
                    changed = True

    def banishable(self, storage):
        made = any(tensor.storage is storage and tensor.made for tensor in self.tensors)
        if storage.gone or storage.locks or not made or storage.names:
            return False
        for tensor in self.tensors:
            elsewhere = tensor.storage is not storage and not tensor.storage.gone
            reads = tensor.op is not None and any(source.storage is storage for source in tensor.op.inputs)
            if elsewhere and reads and tensor.made and not tensor.defined:
                return False
        return True

    # Scores.

    def ops_of(self, storage):
        return {tensor.op for tensor in self.tensors if tensor.storage is storage and tensor.made and tensor.op}

    def cost(self, storage):
        return sum(op.cost for op in self.ops_of(storage))

    def upwards(self, storage):
        read = {tensor.storage for op in self.ops_of(storage) for tensor in op.inputs}
        return {one for one in read if one is not storage and not one.gone}

    def downwards(self, storage):
        return {one for one in self.storages if not one.gone and storage in self.upwards(one)}

    def near(self, storage):
        return self.upwards(storage) | self.downwards(storage)

    def evicted_beyond(self, storage, step):
        found, todo = set(), [storage]
        while todo:
            for one in step(todo.pop()):
                if not one.resident and one not in found and one is not storage:
                    found.add(one)
                    todo.append(one)
        return found

    def score(self, storage):
        stale = self.clock - storage.last
        cost = self.cost(storage)
        if self.heuristic in ("dtr", "e_star", "msps"):
            around = self.evicted_beyond(storage, self.upwards)
            if self.heuristic != "msps":
                around |= self.evicted_beyond(storage, self.downwards)
            cost += sum(self.cost(one) for one in around)
        if self.heuristic == "dtr_eq":
            labels = {self.label[one] for one in self.near(storage) if one in self.label}
            cost += sum(self.sums[label] for label in labels)
        value, by = {
            "dtr": (cost, storage.size * stale),
            "dtr_eq": (cost, storage.size * stale),
            "dtr_local": (cost, storage.size * stale),
            "lru": (storage.last, 1),
            "size": (1, storage.size),
            "msps": (cost, storage.size),
            "e_star": (cost, 1),
        }[self.heuristic]
        return value / by if by else math.inf
