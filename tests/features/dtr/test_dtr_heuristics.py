"""Heuristics by their formulas, and the pools that search for the victim."""

from __future__ import annotations

import math
import random

import pytest
import torch

import torch_remat as remat
from torch_remat.dtr import HEURISTICS, Heuristic, RatioHeuristic
from torch_remat.dtr._pool import IndexPool, ScanPool, make_pool
from torch_remat.dtr.heuristics import Dtr, DtrEq, EStar, Local, Lru, Msps, Random, Size, resolve
from torch_remat.errors import UsageError


class Block:
    """A storage by hand."""

    def __init__(self, name, cost=1, size=1, parents=(), last=0):
        self.name, self.cost, self.size_bytes, self.last_access = name, cost, size, last
        self.resident, self.note, self.place = True, None, -1
        self.parents, self.children = list(parents), []
        for parent in parents:
            parent.children.append(self)


def evict(heuristic, *blocks):
    for block in blocks:
        block.resident = False
        heuristic.evicted(block)


def bring_back(heuristic, *blocks):
    for block in blocks:
        block.resident = True
        heuristic.rematerialized(block)


def diamond():
    """a -> b -> d, a -> c -> d, d -> e."""
    a = Block("a", 1)
    b, c = Block("b", 2, parents=[a]), Block("c", 4, parents=[a])
    d = Block("d", 8, parents=[b, c])
    return a, b, c, d, Block("e", 16, size=2, parents=[d], last=5)


def test_formulas_of_a_storage_alone():
    block = Block("x", cost=6, size=3, last=2)
    assert Local().score(block, 12) == 6 / (3 * 10)
    assert Lru().score(block, 12) == 2
    assert Size().score(block, 12) == 1 / 3
    assert Dtr().score(block, 12) == DtrEq().score(block, 12) == 6 / (3 * 10)
    assert Msps().score(block, 12) == 6 / 3
    assert EStar().score(block, 12) == 6


@pytest.mark.parametrize("heuristic", [Local(), Size(), Dtr(), DtrEq(), Msps()])
def test_zero_denominators_are_infinite(heuristic):
    assert heuristic.score(Block("x", size=0, last=2), 12) == math.inf
    if heuristic.decays:
        assert heuristic.score(Block("x", size=4, last=12), 12) == math.inf


def test_exact_neighbourhood_counts_each_evicted_storage_once_and_stops_at_residents():
    a, b, c, d, e = diamond()
    dtr, ancestors, e_star = Dtr(), Msps(), EStar()
    for heuristic in (dtr, ancestors, e_star):
        for block in (a, b, c, d, e):
            block.note, block.resident = None, True
        evict(heuristic, a, b, c, d)
        above = 1 + 2 + 4 + 8
        assert heuristic.ratio(e)[0] == 16 + above
        bring_back(heuristic, d)
        assert heuristic.ratio(e)[0] == 16
        assert heuristic.ratio(d)[0] == 8 + 1 + 2 + 4
        bring_back(heuristic, a)
        evict(heuristic, d)
        below = 0 if heuristic is ancestors else 2 + 4 + 8
        assert heuristic.ratio(a)[0] == 1 + below
    assert dtr.score(e, 10) == (16 + 2 + 4 + 8) / (2 * 5)


def test_siblings_are_no_neighbours_in_the_exact_neighbourhood_and_are_in_the_components():
    a, b, c, d, _e = diamond()
    for heuristic, wanted in ((Dtr(), 2 + 1), (DtrEq(), 2 + 1 + 4)):
        for block in (a, b, c, d):
            block.note, block.resident = None, True
        evict(heuristic, a, c)  # b is made from a, and so is c
        assert heuristic.ratio(b)[0] == wanted


def test_components_keep_phantom_links():
    one = Block("one", 1)
    two = Block("two", 2, parents=[one])
    three = Block("three", 4, parents=[two])
    four = Block("four", 8, parents=[three])
    eq = DtrEq()
    evict(eq, one, two, three)
    assert eq.ratio(four)[0] == 8 + 7
    bring_back(eq, two)
    assert eq.ratio(four)[0] == 8 + 5  # one is not next to three any more, but still counted
    assert eq.ratio(two)[0] == 2 + 5  # the component is counted once
    evict(eq, two)
    assert eq.ratio(four)[0] == 8 + 7
    bring_back(eq, one, two, three)
    assert eq.ratio(four)[0] == 8


def test_a_storage_that_is_gone_is_no_longer_counted():
    for heuristic in (Dtr(), DtrEq()):
        a, b, c, d, _e = diamond()
        evict(heuristic, a, b)
        assert heuristic.ratio(d)[0] == 8 + 3
        heuristic.removed(b)
        a.children.remove(b)
        d.parents.remove(b)
        assert heuristic.ratio(d)[0] == 8
        assert heuristic.ratio(c)[0] == 4 + 1


def test_random_is_uniform():
    pool = make_pool(Random(seed=5))
    blocks = [Block(str(number)) for number in range(5)]
    for block in blocks:
        pool.add(block)
    found = [pool.victim(1).name for _ in range(2000)]
    assert all(300 < found.count(str(number)) < 500 for number in range(5))


def test_names_classes_and_instances_resolve():
    for name, kind in HEURISTICS.items():
        assert type(resolve(name)) is type(resolve(kind)) is kind
    given = Random(7)
    assert resolve(given) is given
    assert set(HEURISTICS) == {"dtr", "dtr_eq", "dtr_local", "lru", "size", "msps", "random", "e_star"}
    for wrong in ("", "least", None, 3, object):
        with pytest.raises(UsageError, match="dtr_eq"):
            resolve(wrong)


def test_base_asks_for_a_score():
    with pytest.raises(NotImplementedError, match=r"Heuristic is a heuristic without score\(storage, clock\)"):
        Heuristic().score(Block("x"), 1)


# Pools.


class Weighted(RatioHeuristic):
    """A ratio whose numerator is the cost, so that a test can change it."""

    decays = True

    def ratio(self, storage):
        return storage.cost, storage.size_bytes


class Plain(Weighted):
    decays = False


class ScanBeside(ScanPool):
    """Scans storages whose `place` is that in another pool."""

    def add(self, storage):
        self._storages[storage] = None

    def discard(self, storage):
        self._storages.pop(storage, None)


@pytest.mark.parametrize("kind", [Weighted, Plain, Lru])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "float"])
def test_index_names_the_storage_that_a_scan_names(kind, whole):
    """Random additions, removals, accesses and changes of score, with many ties, at clocks that go on or stand."""
    number = (lambda most: draw.randint(0, most)) if whole else (lambda most: draw.uniform(0, most))
    for seed in range(15):
        draw = random.Random(seed)
        index, scan = make_pool(kind(), "index"), ScanBeside(kind())
        changed = index._heuristic.changed
        clock, here = number(3), []
        for _ in range(400):
            clock += number(3) if draw.random() < 0.6 else 0
            what = draw.random()
            if what < 0.45 or not here:
                block = Block("", number(4), draw.randint(0, 3), last=max(0, clock - number(6)))
                here.append(block)
                index.add(block)
                scan.add(block)
            elif what < 0.6:
                block = here.pop(draw.randrange(len(here)))
                index.discard(block)
                scan.discard(block)
                assert block.place == -1
            elif what < 0.7:
                block = draw.choice(here)
                block.last_access = clock
                index.touch(block)
                scan.touch(block)
            elif what < 0.8:
                block = draw.choice(here)
                block.cost = number(4)
                changed.add(block.place)
            else:
                victim = index.victim(clock)
                assert victim is scan.victim(clock)
                if draw.random() < 0.5:
                    here.remove(victim)
                    index.discard(victim)
                    scan.discard(victim)
            assert len({block.place for block in here}) == len(scan._storages) == len(here)
            assert all(index._storages[block.place] is block for block in here)
        while here:
            clock += number(9)
            victim = index.victim(clock)
            assert victim is scan.victim(clock)
            here.remove(victim)
            index.discard(victim)
            scan.discard(victim)
        assert index.victim(clock) is scan.victim(clock) is None


def duels_for_each_eviction(live, monkeypatch):
    """Storages come, age and go; a chain, so that components form and merge."""
    played = 0
    duel = IndexPool._duel

    def counted(self, *args):
        nonlocal played
        played += 1
        return duel(self, *args)

    monkeypatch.setattr(IndexPool, "_duel", counted)
    heuristic = DtrEq()
    pool = make_pool(heuristic, "index")
    blocks = [Block("", 3)]
    for clock in range(1, live + 300):
        blocks.append(Block("", random.Random(clock).randint(1, 9), 4, parents=[blocks[-1]], last=clock))
        pool.add(blocks[-1])
        if clock == live:
            pool.victim(clock)
            played, looked = 0, pool.scored
        if clock > live:
            victim = pool.victim(clock)
            pool.discard(victim)
            evict(heuristic, victim)
    monkeypatch.undo()
    return played / 299, (pool.scored - looked) / 299


def test_work_of_an_eviction_hardly_grows_with_the_live_storages(monkeypatch):
    few, looked_few = duels_for_each_eviction(100, monkeypatch)
    many, looked_many = duels_for_each_eviction(10_000, monkeypatch)
    assert many < 4 * few  # 14 rounds of a tournament where there were 7
    assert looked_many < 2 * looked_few < 20


def test_sample_looks_at_the_square_root_and_finds_a_good_one():
    pool = make_pool(Plain(), "sample", seed=1)
    blocks = [Block("", cost) for cost in range(1, 10_001)]
    for block in blocks:
        pool.add(block)
    ranks = []
    for _ in range(50):
        before = pool.scored
        victim = pool.victim(1)
        assert pool.scored - before in (99, 100)
        ranks.append(victim.cost)
        pool.discard(victim)
        assert victim.place == -1
    assert sum(ranks) / 50 < 300  # the best of 100 is in the best hundredth, on average
    assert len(pool._storages) == 9950


def test_the_search_that_suits_is_taken():
    class Mine(Heuristic):
        def score(self, storage, clock):
            return 1

    assert isinstance(make_pool(Lru()), IndexPool)
    assert isinstance(make_pool(Mine()), ScanPool)


class Frequent(Heuristic):
    """As in the docs: what had to come back before is kept longer."""

    back = 0

    def score(self, storage, clock):
        times = 1 + (storage.note or 0)
        return times * storage.cost / max(1e-9, storage.size_bytes * (clock - storage.last_access))

    def rematerialized(self, storage):
        storage.note = (storage.note or 0) + 1
        self.back += 1


def test_a_heuristic_of_ones_own_runs_live_and_in_simulation(tmp_path):
    def step():
        weight = torch.linspace(-1, 1, 256).view(16, 16).requires_grad_()
        x = torch.ones(64, 16)
        for _ in range(12):
            x = (x @ weight).tanh()
        x.sum().backward()
        return weight.grad

    plain = step()
    with remat.dtr.record(tmp_path / "step.log"):
        step()
    log = remat.dtr.Log.load(tmp_path / "step.log")
    simulated, live = Frequent(), Frequent()
    assert remat.dtr.simulate(log, 0.6 * log.peak_bytes, simulated, max_overhead=100).rematerializations > 0
    with remat.dtr.budget("48 KiB", heuristic=live, cost="flops"):
        gradient = step()
    assert torch.equal(plain, gradient)
    assert min(simulated.back, live.back) > 0
