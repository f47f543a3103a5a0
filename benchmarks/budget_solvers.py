"""torch's own compiled budget with other choices of what is kept: its solvers, and the minimum cuts of `remat.budget`.

``activation_memory_budget`` of `torch.compile` has the partitioner save values of the joint graph. Which, a *solver*
says: a knapsack by dynamic programming (``dp``), by benefit per byte (``greedy``), or by integers (``ilp``). Here our
ladders take their place: the forward part of that graph is recorded as that of a region would be, op by op. All get the
same milliseconds of each op, measured beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from statistics import median
from time import perf_counter_ns
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomKnapsackSolver, CustomRuntimeEstimator
from torch.fx import Node
from torch.utils._mode_utils import no_dispatch

from torch_remat.ladders import ladder
from torch_remat.ladders.record import Record, Step

from .budget_models import Model, plain
from .budget_peaks import warm_up_compiled
from .budget_ways import Way, flops_of_products, kept_and_peak_bytes, take_times, torch_budget
from .contenders import NONE
from .tables import markdown

SHARES = (0.1, 0.3, 0.5, 0.7)
SOLVERS = ("dp", "greedy", *(["ilp"] if find_spec("scipy") else []), "ladders")
BACKEND = "aot_eager_decomp_partition"
_REPEATS = 5  # of each op, of which the fastest counts
_TILT = 1e-5  # by which an op counts more than the one before: else equal blocks have all their rungs together


class Measured(CustomRuntimeEstimator):  # type: ignore[misc]
    """Estimates the milliseconds of a node by running its op on this machine, on tensors of the same layout."""

    def __init__(self) -> None:
        self._known: dict[Any, float] = {}

    def __call__(self, node: Node) -> float:
        """Return the milliseconds."""
        key = str((node.target, [_said(arg) for arg in (*node.args, *node.kwargs.values())]))
        if key not in self._known:
            self._known[key] = self._measure(node)
        return self._known[key]

    def uuid(self) -> None:
        """Return nothing, so that nothing is cached."""

    def _measure(self, node: Node) -> float:
        with no_dispatch(), torch.no_grad():
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), _made)
            taken = []
            for _ in range(_REPEATS):
                begin = perf_counter_ns()
                node.target(*args, **kwargs)  # type: ignore[operator]
                taken.append(perf_counter_ns() - begin)
        return min(taken) / 1e6


class Ladders(CustomKnapsackSolver):  # type: ignore[misc]
    """Chooses what is saved by the minimum cuts of `torch_remat.ladders`."""

    def __init__(self, runtime: Measured) -> None:
        self._runtime = runtime

    def uuid(self) -> None:
        """Return nothing, so that nothing is cached."""

    def __call__(
        self, memory: list[float], joint_graph: Any, max_memory: float, node_info: Any, candidates: list[Node]
    ) -> tuple[list[int], list[int]]:
        """Return which candidates do not run again, whatever is saved for that, and which may.

        Args:
            memory: Their sizes, of which 1 is what the partitioner would save without a budget.
            joint_graph: Forward and backward.
            max_memory: How much may be saved, in the same unit.
            node_info: Which nodes belong to forward.
            candidates: What the partitioner lets choose.
        """
        record, every = self._record(node_info.required_fw_nodes), range(len(candidates))
        free = dict.fromkeys(("_RUN_NS", "_ACT_NS", "_SEEN_NS", "_REGION_NS"), 0)
        with patch.multiple(ladder, **free):  # compiled code has no calls that cost
            rungs = ladder.Ladder(record).rungs
        chosen: list[int] = []
        for rung in rungs:
            again = {name for name, _ in rung.runs}
            found = [at for at in every if candidates[at].name not in again]
            if sum(memory[at] for at in found) <= max_memory:
                chosen = found
        return chosen, [at for at in every if at not in chosen]

    def _record(self, forward: Sequence[Node]) -> Record:
        """Return forward as a region's record would have it; a view is in the unit of its base."""
        record, unit_of, inside = Record(), dict[Node, int](), set(forward)
        for node in forward:
            if node.op != "call_function" or not isinstance(node.meta.get("val"), (Tensor, list, tuple)):
                continue
            given = [one for one in node.all_input_nodes if one in unit_of]
            if _is_view(node) and given:
                unit_of[node] = unit_of[given[0]]
            else:
                unit_of[node] = unit = record.new_unit(_bytes(node.meta["val"]))
                record.writers[unit].append(len(record.steps))
                reads = [(one, 1) for one in dict.fromkeys(unit_of[one] for one in given)]
                ns = int(self._runtime(node) * 1e6 * (1 + _TILT * len(record.steps)))
                step = Step(node, 0, node.name, ns, reads, [unit], results=(unit,), saves=True)
                record.steps.append(step)
            if any(reader not in inside for reader in node.users):
                record.saved.add(unit_of[node])
        record.whole_bytes = sum(record.sizes[unit] for unit in record.saved)
        return record


def solvers(model: Model, rounds: int) -> dict[str, Any]:
    """Return bytes and times of a model under torch's compiled budgets, by solver, in turn with eager code."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 10 * len(SHARES) * len(SOLVERS)
    runtime = Measured()
    ways, equal = {NONE: Way(plain)}, {NONE: True}
    for share in (*SHARES, 1.0):
        for solver in SOLVERS if share < 1 else ("dp",):
            chooses = Ladders(runtime) if solver == "ladders" else solver
            options = {"activation_memory_budget_solver": chooses}
            options["activation_memory_budget_runtime_estimator"] = runtime
            way = torch_budget(model, share, BACKEND, **options)
            equal[name] = warm_up_compiled(model, way) if (name := f"{share} {solver}") else False
            ways[name] = way
    counted = {name: (*kept_and_peak_bytes(model, way), flops_of_products(model, way)) for name, way in ways.items()}
    samples = take_times(model, ways, rounds)
    rows = {
        name: {
            "to 1.0": median(one / other for one, other in zip(taken, samples["1.0 dp"], strict=True)),
            "kept": counted[name][0],
            "peak": counted[name][1],
            "recomputed": counted[name][2] / counted[NONE][2] - 1,
            "equal": equal[name],
        }
        for name, taken in samples.items()
    }
    return {"model": model.name, "rows": rows}


def solvers_table(found: dict[str, Any]) -> str:
    """Return the results as a table."""
    head = [f"{found['model']}, compiled", "to 1.0", "kept, MiB", "peak, MiB", "products again", "gradients"]
    rows = []
    for name, row in found["rows"].items():
        sizes = [f"{row[what] / 2**20:.2f}" for what in ("kept", "peak")]
        again = f"{100 * row['recomputed']:.1f} %"
        rows.append([name, f"{row['to 1.0']:.3f}", *sizes, again, "equal" if row["equal"] else "others"])
    return markdown(head, rows)


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # such as `getitem`
        return True
    returns = [one.alias_info for one in schema.returns]
    return any(info is not None and not info.is_write for info in returns)


def _bytes(value: Any) -> int:
    parts = value if isinstance(value, (list, tuple)) else [value]
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, Tensor))


def _said(arg: Any) -> Any:
    if isinstance(arg, Node) and isinstance(value := arg.meta.get("val"), Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return arg


def _made(node: Node) -> Any:
    value = node.meta["val"]
    if isinstance(value, (list, tuple)):
        return type(value)(_like(one) for one in value)
    return _like(value)


def _like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    extent = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True) if size)
    memory = torch.zeros(extent + 1, dtype=value.dtype)
    return (memory.normal_() if memory.is_floating_point() else memory).as_strided(tuple(value.shape), value.stride())
