"""What the tests share: counting calls and ops, comparing gradients, watching storages die.

The reference of every comparison is the same code without checkpointing, and equal means bit for bit.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import torch_remat as remat
from torch_remat.dispatch.region import region as dispatch_region

Wrap = Callable[[Callable], Callable]
OLDEST = torch.__version__.startswith("2.10.")  # which lacks what some tests are about


def plain(function: Callable) -> Callable:
    """Return the function as it is: the reference."""
    return function


def checkpointed(function: Callable, **options: Any) -> Callable:
    """Return the function as a checkpointed region."""
    return remat.checkpoint(**options)(function)


class Calls:
    """Counts the calls of a function, and how many of them were replays.

    Attributes:
        total: All calls.
        replays: Calls during which `remat.is_recomputing()` was true.
    """

    def __init__(self, function: Callable) -> None:
        self.function = function
        self.total = 0
        self.replays = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.total += 1
        self.replays += remat.is_recomputing()
        return self.function(*args, **kwargs)


class CountOps(TorchDispatchMode):
    """Counts aten ops by name (`"mm"`, `"sin"`) while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class LiveStorages(TorchDispatchMode):
    """Watches the storage of every tensor that an op makes while the mode is entered; holds none of them.

    What shares memory with an input of the op, such as a view of a parameter, is not made by it. Placeholders are
    passed over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in([args, kwargs]) if has_storage(tensor)}
        for tensor in tensors_in([out]):
            if has_storage(tensor) and tensor.untyped_storage()._cdata not in given:
                self.watch(tensor)
        return out

    def watch(self, tensor: Tensor) -> None:
        """Count this tensor's storage too."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self.seen[reference.cdata] = (reference, storage.nbytes())

    def bytes(self) -> int:
        """Return the bytes of the watched storages that are alive."""
        return sum(nbytes for reference, nbytes in self.seen.values() if not reference.expired())

    def count(self) -> int:
        """Return how many of the watched storages are alive."""
        return sum(not reference.expired() for reference, _ in self.seen.values())


@contextlib.contextmanager
def no_other_regions() -> Iterator[None]:
    """Let reports forget the regions of earlier tests: errors, and caches of tests, keep some alive."""
    before, dispatch_region._regions = dispatch_region._regions, set()
    try:
        yield
    finally:
        dispatch_region._regions = before


def has_storage(tensor: Tensor) -> bool:
    """Return whether the tensor has data: a placeholder has none."""
    return not remat.is_placeholder(tensor)


def watch(*tensors: Tensor) -> list[StorageWeakRef]:
    """Return weak references to the tensors' storages."""
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def alive(references: list[StorageWeakRef]) -> int:
    """Return how many of the watched storages are alive."""
    return sum(not reference.expired() for reference in references)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Collect once, then leave the garbage collector off: inside, reference counts alone free things."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def shown(value: object) -> str:
    """Return a value as a test's name shows it: without addresses, so that all processes of a run name it alike."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def python_objects() -> tuple[int, int, int]:
    """Return the numbers of live tensors, of tracked Python objects and of allocated memory blocks.

    A block whose storage freed nothing yet is not counted twice: the caller compares differences.
    """
    objects = gc.get_objects()
    tensors = sum(issubclass(type(item), Tensor) for item in objects)
    return tensors, len(objects), sys.getallocatedblocks()


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (tuple, list)):
        return [tensor for item in tree for tensor in tensors_in(item)]
    return []


def assert_same(expected: Any, actual: Any, what: str = "result") -> None:
    """Assert that two trees of tensors are equal bit for bit (NaN equals NaN)."""
    left, right = tensors_in(expected), tensors_in(actual)
    assert len(left) == len(right), f"{what}: {len(left)} and {len(right)} tensors"
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        assert one.dtype == other.dtype, f"{what} {index}: {one.dtype} and {other.dtype}"
        assert one.shape == other.shape, f"{what} {index}: {one.shape} and {other.shape}"
        same = torch.equal(one, other) or (
            (one.isnan() == other.isnan()).all() and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
        assert same, f"{what} {index}:\n{one}\n{other}"


def leaf_copies(inputs: Any) -> list[Any]:
    """Return inputs with each tensor as a new leaf that requires grad as before."""
    return [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]


def run_with_gradients(function: Callable, inputs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Run the function from a fixed seed; return detached outputs and the gradients of all floating outputs."""
    torch.manual_seed(1)
    leaves = leaf_copies(inputs)
    out = function(*leaves)
    needing = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    differentiable = [y for y in tensors_in(out) if y.requires_grad]
    weights = [torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y) for y in differentiable]
    kept = [y.detach().clone() for y in tensors_in(out)]
    gradients = torch.autograd.grad(differentiable, needing, weights, allow_unused=True)
    return kept, [torch.full((), torch.nan) if g is None else g for g in gradients]


def assert_equal_gradients(fn_plain: Callable, fn_checkpointed: Callable, inputs: Any) -> None:
    """Assert that both functions give equal outputs and equal gradients for all inputs, bit for bit.

    Args:
        fn_plain: The reference, without checkpointing.
        fn_checkpointed: The same code with a checkpointed region.
        inputs: Positional arguments; tensors among them are copied, so both runs start from equal leaves.
    """
    expected, expected_gradients = run_with_gradients(fn_plain, inputs)
    actual, actual_gradients = run_with_gradients(fn_checkpointed, inputs)
    assert_same(expected, actual, "output")
    assert_same(expected_gradients, actual_gradients, "gradient")


def assert_same_program(program: Callable[[Wrap], Any], *, replays: int | None = None, **options: Any) -> None:
    """Assert that a whole program gives the same tensors with and without checkpointing.

    The program takes `wrap`, which it puts around the functions that become regions, builds all that it needs
    itself, and returns the tensors to compare. Both runs start from one seed.

    Args:
        program: The program.
        replays: How often, in all, wrapped functions must have run in replay; not checked if None.
        **options: Options of `remat.checkpoint`.
    """
    torch.manual_seed(2)
    expected = program(plain)
    counters: list[Calls] = []

    def wrap(function: Callable) -> Callable:
        counters.append(Calls(function))
        return checkpointed(counters[-1], **options)

    torch.manual_seed(2)
    assert_same(expected, program(wrap))
    assert counters, "the program wrapped nothing"
    if replays is not None:
        assert sum(counter.replays for counter in counters) == replays


def assert_clean_state() -> None:
    """Assert that no saved-tensor hooks, dispatch modes, autocast or changed grad mode were left behind."""
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert _get_current_dispatch_mode_stack() == []
    probe = torch.ones(1, requires_grad=True).exp()
    assert probe.grad_fn._saved_result.data_ptr() == probe.data_ptr()
    assert torch.empty(0).device.type == "cpu"


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Run ``work(0)``, ``work(1)``, ... in a thread each, and wait for all."""
    threads = [threading.Thread(target=work, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def leaf(*shape: int, **kwargs: Any) -> Tensor:
    """Return a random leaf that requires grad."""
    return torch.randn(shape, requires_grad=True, **kwargs)


def chain(x: Tensor) -> Tensor:
    """Saves four tensors: a sine's input, an exponential's result, both factors of a product."""
    h = x.sin().exp()
    return h * x.cos()


class Mlp(nn.Module):
    """Two linear layers around a GELU, as a residual branch."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Attention(nn.Module):
    """One head of self-attention with dropout, over `(batch, sequence, width)`."""

    def __init__(self, width: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return x + nn.functional.dropout(weights, self.dropout, self.training) @ v


class Stack(nn.Module):
    """Attention and Mlp blocks in turn; each is wrapped by `wrap`."""

    def __init__(self, wrap: Wrap = plain, depth: int = 2, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(width) for _ in range(depth) for kind in (Attention, Mlp))
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.wrap(block)(x)
        return x


def parameter_gradients(module: nn.Module) -> list[Tensor]:
    """Return the gradients of those parameters that have one; there must be some."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert gradients
    return gradients


def train_step(module: nn.Module, x: Tensor, run: Callable | None = None, **kwargs: Any) -> list[Tensor]:
    """Return the output and the gradients of input and parameters of a step from a fixed seed.

    Args:
        module: The module.
        x: The input, which is copied.
        run: Takes the module and its arguments, and runs it.
        **kwargs: More arguments of the module.
    """
    torch.manual_seed(1)
    module.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    y = module(x, **kwargs) if run is None else run(module, x, **kwargs)
    y.square().sum().backward()
    return [y.detach(), x.grad, *parameter_gradients(module)]


@contextlib.contextmanager
def refused_if(may_refuse):
    """Allow that forward refuses a gradient that is taken inside of it, where it passes through what is saved."""
    try:
        yield
    except remat.UsageError as error:
        assert may_refuse, "plain regions refuse no gradient"
        assert "gradient is taken" in str(error)  # noqa: PT017


def name_of(value: Any) -> str | None:
    """Return a function's name, for the names of tests; None leaves the name to pytest."""
    return getattr(value, "__name__", None)


def pairwise(
    *,
    possible: Callable[..., bool] = lambda **_: True,
    ids: Callable[[Any], str | None] = name_of,
    **axes: Iterable[Any],
) -> pytest.MarkDecorator:
    """Parametrize a test by rows in which each two values of different arguments meet; the other rows are `slow`.

    Most faults need two causes, not five: the full product finds little more, and takes minutes.

    Args:
        possible: Takes a row as keywords, and tells whether there is such a case.
        ids: Makes names of values, as `ids` of `pytest.mark.parametrize`.
        **axes: The values of each argument; of a dict the keys.
    """
    names, values = list(axes), [list(axis) for axis in axes.values()]
    rows = [
        row
        for row in itertools.product(*(range(len(axis)) for axis in values))
        if possible(**{name: axis[place] for name, axis, place in zip(names, values, row, strict=True)})
    ]
    met: set[Any] = set()
    chosen = []
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    for least in range(len(names) * (len(names) - 1) // 2, 0, -1):  # first the rows in which most pairs are new
        for row in rows:
            if len(pairs[row] - met) >= least:
                met |= pairs[row]
                chosen.append(row)
    kept = set(chosen)
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *(axis[place] for axis, place in zip(values, row, strict=True)),
                marks=() if row in kept else pytest.mark.slow,
            )
            for row in [*chosen, *(row for row in rows if row not in kept)]
        ],
        ids=ids,
    )
