"""A slow, obvious simulator straight from the rules, to hold the library's against; it shares no code with it.

It reads the lines itself, scans every list, searches neighbourhoods anew for every score, relabels components one
storage at a time, and recurses.
"""

from __future__ import annotations

import json
import math
from types import SimpleNamespace


class Thing(SimpleNamespace):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class RanOut(Exception):
    pass


class Stopped(Exception):
    pass


class Reference:
    def __init__(self, lines, budget, heuristic, deallocation="eager", max_overhead=2.0):
        records = [json.loads(line) for line in lines]
        self.records = [record for record in records if record.get("ANNOTATION") != "START"]
        self.budget, self.heuristic, self.deallocation = budget, heuristic, deallocation
        self.base = sum(int(record["TIME"]) for record in records if "TIME" in record)
        self.most_again = (max_overhead - 1) * self.base
        self.tensors, self.storages, self.pool, self.meaning = [], [], [], {}
        self.clock = self.again = self.used = self.peak = self.evictions = self.reruns = 0
        self.unbound = []  # results of the op that is running, which will get a name
        self.label, self.sums = {}, {}  # dtr_eq: component of each evicted storage; sum of each component

    def run(self):
        ran_out = stopped = False
        try:
            self.read()
            for tensor in self.tensors:
                if any(tensor is named for named in self.meaning.values()):
                    self.materialize(tensor)
                    tensor.storage.pinned = True
                    self.refill(tensor.storage)
        except RanOut:
            ran_out = True
        except Stopped:
            stopped = True
        return {
            "base_compute": self.base,
            "total_compute": self.clock,
            "evictions": self.evictions,
            "rematerializations": self.reruns,
            "peak_bytes": self.peak,
            "ran_out": ran_out,
            "stopped": stopped,
        }

    # The log.

    def read(self):
        records = iter(self.records)
        for record in records:
            kind = record["INSTRUCTION"]
            if kind == "CONSTANT":
                storage = self.new_storage(int(next(records)["MEMORY"]), pinned=True)
                self.make_room(storage.size)
                self.charge(storage.size)
                storage.resident, storage.last = True, self.clock
                self.bind(record["NAME"], self.new_tensor(storage, None, defined=True))
            elif kind == "CALL":
                inputs = [self.meaning[name] for name in record["ARGS"]]
                op = Thing(cost=int(record["TIME"]), inputs=inputs, outputs=[])
                for _ in record["RESULT"]:
                    size, alias = int(next(records)["MEMORY"]), int(next(records)["ALIAS"])
                    storage = self.new_storage(size) if alias < 0 else inputs[alias].storage
                    op.outputs.append(self.new_tensor(storage, op, root=alias < 0))
                self.unbound = op.outputs
                self.run_op(op, first=True)
                for name, tensor in zip(record["RESULT"], op.outputs, strict=True):
                    self.bind(name, tensor)
                self.unbound = []
            elif kind == "MUTATE":
                inputs = [self.meaning[name] for name in record["ARGS"]]
                op = Thing(cost=int(record["TIME"]), inputs=inputs, outputs=[])
                written = list(dict.fromkeys(record["ARGS"][int(index)] for index in record["MUTATE"]))
                for name in written:
                    op.outputs.append(self.new_tensor(self.new_storage(self.meaning[name].storage.size), op))
                self.unbound = op.outputs
                self.run_op(op, first=True)
                for name, tensor in zip(written, op.outputs, strict=True):
                    self.bind(name, tensor)
                self.unbound = []
            elif kind in ("COPY", "COPY_FROM"):
                self.bind(record["DST"], self.meaning[record["SRC"]])
            elif kind == "RELEASE":
                tensor = self.meaning.pop(record["NAME"], None)
                self.maybe_dead(tensor)

    def bind(self, name, tensor):
        old = self.meaning.get(name)
        self.meaning[name] = tensor
        self.maybe_dead(old)

    def maybe_dead(self, tensor):
        if tensor is None or self.named(tensor.storage):
            return
        storage = tensor.storage
        if self.deallocation == "eager" and storage.resident and not storage.pinned:
            self.evict(storage)
        if self.deallocation == "banish":
            self.banish_all()

    def named(self, storage):
        return any(tensor.storage is storage for tensor in [*self.meaning.values(), *self.unbound])

    def new_storage(self, size, pinned=False):
        made = Thing(
            size=size, pinned=pinned, resident=False, last=0, locks=0, gone=False, cut=[], number=len(self.storages)
        )
        self.storages.append(made)
        return made

    def new_tensor(self, storage, op, defined=False, root=True):
        made = Thing(storage=storage, op=op, defined=defined, made=defined, root=root)
        self.tensors.append(made)
        return made

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
            self.reruns += 1
            self.again += op.cost
        for tensor in op.outputs:
            storage = tensor.storage
            if tensor.root and (storage.gone or storage.resident):
                self.used -= storage.size
            if storage.gone:
                continue
            came_back = not first and not storage.resident
            storage.resident = tensor.defined = tensor.made = True
            if first:
                storage.last = self.clock
            if came_back and self.heuristic == "dtr_eq":
                self.sums[self.label.pop(storage.number)] -= self.cost(storage)
            self.refill(storage)
        for tensor in op.inputs:
            tensor.storage.locks -= 1
            self.refill(tensor.storage)
            if self.deallocation == "banish":
                self.banish_all()
        if self.again > self.most_again:
            raise Stopped

    def lock(self, storage):
        storage.locks += 1
        self.refill(storage)

    def refill(self, storage):
        """Keep the pool: evictable storages, in the order in which they became so."""
        evictable = storage.resident and not storage.locks and not storage.pinned and not storage.gone
        here = [index for index, one in enumerate(self.pool) if one is storage]
        if evictable and not here:
            self.pool.append(storage)
        elif here and not evictable:
            del self.pool[here[0]]

    def charge(self, size):
        self.used += size
        self.peak = max(self.peak, self.used)

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
            self.evictions += 1
            self.evict(chosen)

    def evict(self, storage):
        storage.resident = False
        self.used -= storage.size
        for tensor in self.tensors:
            if tensor.storage is storage:
                tensor.defined = False
        self.refill(storage)
        if self.heuristic == "dtr_eq":
            near = {self.label[one.number] for one in self.near(storage) if one.number in self.label}
            self.sums[("made", self.clock, len(self.sums))] = total = self.cost(storage)
            made = list(self.sums)[-1]
            for label in near:
                total += self.sums[label]
                for number, its in list(self.label.items()):
                    if its == label:
                        self.label[number] = made
            self.label[storage.number] = made
            self.sums[made] = total

    def banish_all(self):
        changed = True
        while changed:
            changed = False
            for storage in self.storages:
                if self.banishable(storage):
                    children = self.downwards(storage)
                    if not storage.resident and self.heuristic == "dtr_eq":
                        self.sums[self.label.pop(storage.number)] -= self.cost(storage)
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
        if storage.gone or storage.locks or not made or self.named(storage):
            return False
        for tensor in self.tensors:
            elsewhere = tensor.storage is not storage and not tensor.storage.gone
            reads = tensor.op is not None and any(source.storage is storage for source in tensor.op.inputs)
            if elsewhere and reads and tensor.made and not tensor.defined:
                return False
        return True

    # Scores.

    def ops_of(self, storage):
        ops = []
        for tensor in self.tensors:
            if tensor.storage is storage and tensor.made and tensor.op is not None and tensor.op not in ops:
                ops.append(tensor.op)
        return ops

    def cost(self, storage):
        return sum({id(op): op.cost for op in self.ops_of(storage)}.values())

    def upwards(self, storage):
        found = []
        for op in self.ops_of(storage):
            for tensor in op.inputs:
                one = tensor.storage
                if one is not storage and not one.gone and not any(one is other for other in found):
                    found.append(one)
        return found

    def downwards(self, storage):
        return [
            one
            for one in self.storages
            if one is not storage and not one.gone and any(storage is other for other in self.upwards(one))
        ]

    def near(self, storage):
        return self.upwards(storage) + self.downwards(storage)

    def evicted_beyond(self, storage, step):
        found, todo = {}, [storage]
        while todo:
            for one in step(todo.pop()):
                if not one.resident and one.number not in found and one is not storage:
                    found[one.number] = one
                    todo.append(one)
        return found

    def score(self, storage):
        stale = self.clock - storage.last
        cost = self.cost(storage)
        if self.heuristic in ("dtr", "e_star", "msps"):
            around = self.evicted_beyond(storage, self.upwards)
            if self.heuristic != "msps":
                around |= self.evicted_beyond(storage, self.downwards)
            cost += sum(self.cost(one) for one in around.values())
        if self.heuristic == "dtr_eq":
            labels = {self.label[one.number] for one in self.near(storage) if one.number in self.label}
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
