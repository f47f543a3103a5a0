"""The only file that names private torch symbols; each says what breaks without it.

Everything else of this package uses torch's public API, plus ``torch.utils._python_dispatch.TorchDispatchMode``,
which torch documents for use outside although its module has an underscore.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial, wraps
from operator import attrgetter, methodcaller
from threading import Lock, Thread
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.overrides
import torch.utils.checkpoint
from torch._higher_order_ops import utils as _of_higher_order_ops
from torch._higher_order_ops.effects import has_effects
from torch._library.custom_ops import CustomOpDef as CustomOpDef  # what torch.library.custom_op makes of a function
from torch._ops import OperatorBase as OperatorBase  # the types of what torch.ops gives; no public place has them
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import SUPPORTED_NODES

if TYPE_CHECKING:
    import optree as optree
else:

    class _Optree:
        """Loads optree when it is first used: a step whose arguments are plain tensors does without."""

        def __getattr__(self, name: str) -> Any:
            import optree

            setattr(self, name, value := getattr(optree, name))
            return value

    optree = _Optree()

# The namespaces of ops that communicate, most of them private. Without them a policy could not keep what collectives
# return, and random state would be kept for each of them.
COLLECTIVES = frozenset(
    ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
)
# Of ops that torch's own code calls, at most places in C++, where a mode for functions does not see them.
TORCHS_NAMESPACES = COLLECTIVES | frozenset((
    "aten", "prim", "prims", "higher_order", "inductor", "inductor_prims", "rngprims", "debugprims", "fsdp", "streams",
    "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "quantized", "_quantized", "sparse", "_native",
))  # fmt: skip


@cache
def accelerator_type() -> str:
    """Return the type of the accelerator that this machine has, ``"cpu"`` where it has none.

    A build of torch for CUDA names "cuda" also where no driver is installed, unless it is asked what is available. All
    other files ask here.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


# Whether the backward that runs now was called with retain_graph (True outside any backward). The contract of the
# README is that retain_graph is detected without an opt-in, and this is the one place where torch shows it.
graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

# Which backward this thread runs, -1 for none. Without it a region with several outputs would be replayed once for each
# of them, or not again in the next backward.
graph_task: Callable[[], int] = torch._C._current_graph_task_id

# Whether the backward that runs now comes to a node; `RuntimeError` for a leaf for which ``autograd.grad`` was called.
# Without it nothing would say so when a gradient that is taken inside of a region leaves it, and it would be wrong.
would_run: Callable[[torch.autograd.graph.Node], bool] = torch._C._will_engine_execute_node

# The number that the next autograd node of this thread will get. Without it the graph would have to be walked to tell
# nodes made inside a region from older ones, and one op's saved tensors from the next op's.
sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

# The products that have private names, and the public functions that call one of them without asking for overrides.
PRODUCTS_BY_FACE: Mapping[Callable[..., Any], Any] = {
    torch.nn.functional.grouped_mm: torch._grouped_mm,
    torch.nn.functional.scaled_mm: torch._scaled_mm_v2,
    torch.nn.functional.scaled_grouped_mm: torch._scaled_grouped_mm_v2,  # type: ignore[attr-defined]
}
OTHER_PRODUCTS: Sequence[Any] = (torch._scaled_mm, torch._scaled_grouped_mm, torch._int_mm)


# The innermost transform of torch.func that runs now (vmap, grad, jvp), or None. Without it a region would keep the
# tensors of a transform past its end: they have no memory of their own, and hooks are refused.
_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack


def is_transformed() -> bool:
    """Whether a transform of torch.func runs, or a level of forward-mode derivatives is open: no public way to ask."""
    return _transform() is not None or forward_ad._current_level >= 0


# What torch traces code with: tensors without memory, of a fake mode or around functional ones. Such a tensor that a
# region did not get from around it belongs to a trace inside: without the classes it would be taken for the region's.
OF_TRACES = frozenset((FakeTensor, FunctionalTensor))


def trace_runs(of_values: bool = False) -> bool:
    """Whether a mode is active with which torch traces code, or one that notes ops; there is no public way to ask."""
    keys = torch._C._TorchDispatchModeKey
    asked = (keys.PROXY,) if of_values else (keys.PROXY, keys.FAKE, keys.FUNCTIONAL)
    return any(torch._C._get_dispatch_mode(key) is not None for key in asked)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values to look at: on the meta device, in a trace, as a derivative's zero it has none.

    Nor has one inside of a transform, whose wrapper may have outlived it.
    """
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not (is_wrapped or tensor.is_meta or tensor._is_zerotensor() or type(tensor) in OF_TRACES)


# The depth of the torch-function mode stack: zero means that no device context can be active, which spares the
# slow public torch.get_default_device().
function_mode_depth: Callable[[], int] = torch._C._len_torch_function_stack


def function_modes() -> tuple[TorchFunctionMode, ...]:
    """Return the torch-function modes of users that are active, outermost first; there is no public list.

    Without them replay would not run under the modes of forward. Torch's own hold the default device, or trace.
    """
    stack = torch.overrides._get_current_function_mode_stack()
    return tuple(mode for mode in stack if type(mode).__module__.partition(".")[0] not in ("torch", "torch_remat"))


# Functions that give access to a tensor's memory, or replace it: what is written there no version counter shows.
POINTER_FUNCTIONS: tuple[Any, ...] = (
    torch.Tensor.data.__get__, torch.Tensor.data.__set__, torch.Tensor.numpy, torch.Tensor.__array__,  # type: ignore[attr-defined]
    torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor._typed_storage,
    torch.Tensor.__dlpack__, torch.Tensor.share_memory_, torch.Tensor.set_,
)  # fmt: skip

# Whether Dynamo traces the code that asks; the public ``is_compiling`` asks more, and each torch function would pay.
is_dynamo_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling


@contextlib.contextmanager
def with_function_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """Return a context in which a mode is active; to enter it anew would run what its ``__enter__`` does besides."""
    torch.overrides._push_mode(mode)
    try:
        yield
    finally:
        torch.overrides._pop_mode()


SavedTensorHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


# The innermost pair of saved-tensor hooks, or None. Without it a region could not hand its inputs to the hooks around
# it: they would stay where they are, and a checkpoint around would keep them.
top_saved_tensors_hooks: Callable[[], SavedTensorHooks | None]
top_saved_tensors_hooks = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)


# What the context managers torch.autograd.graph.saved_tensors_hooks and torch.enable_grad call, for a third of their
# time: each region enters both twice. A pop must follow each push in the same thread, so they stand in try/finally.
_push_saved_tensors_hooks: Callable[[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], None]
_push_saved_tensors_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_saved_tensors_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks

# From torch 2.14 on: the saved-tensor hooks of the user's that are on the stack, past those of torch's own checkpoints.
# Its selective checkpointing asks; without the marks below it takes a region's hooks for the user's, and warns.
_hooks_of_the_user: Callable[[], SavedTensorHooks | None] | None
_hooks_of_the_user = getattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks", None)


def push_region_hooks(pack: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
    """Put the hooks of a region on the stack, with the marks of those of torch's checkpoint."""
    if _hooks_of_the_user is None:
        _push_saved_tensors_hooks(pack, unpack)
        return
    around = None if top_saved_tensors_hooks() is None else _hooks_of_the_user()
    _push_saved_tensors_hooks(pack, unpack)
    pack._checkpoint_internal, pack._user_hooks = True, around


def pop_region_hooks(pack: Any) -> None:
    """Take them off. The graph holds the pack hook, where no collector sees it, so that must not hold other hooks."""
    _pop_saved_tensors_hooks()
    if _hooks_of_the_user is not None:
        del pack._user_hooks


# The active torch.utils.checkpoint.GraphExecGroup, whose backwards share one replay; without it each has its own.
graph_exec_group: Callable[[], object | None] = torch.utils.checkpoint.GraphExecGroup._get_current_group


def node_behind(value: Any) -> Any:
    """Return the autograd node that made a tensor; None for other values, and where torch refuses to tell."""
    return None if is_refused(value) else getattr(value, "grad_fn", None)


def is_refused(value: Any) -> bool:
    """Whether torch refuses to describe a view that was made under ``no_grad`` and whose base has a `grad_fn` since."""
    try:
        getattr(value, "grad_fn", None)
    except RuntimeError:
        return True
    return False


def has_one_output(node: Any) -> bool:
    """Whether an autograd node is there, and has a single output, which torch has no public way to ask.

    Without it each call that a policy keeps would be looked into for results that it does not return.
    """
    return len(getattr(node, "_input_metadata", ())) == 1


def has_returned(ctx: Any) -> bool:
    """Whether the forward of a Function has returned and autograd has recorded it, by its autograd context.

    Public names tell no difference to a context whose forward raised.
    """
    try:
        return bool(ctx._input_metadata)
    except RuntimeError:  # before torch 2.13, of a context without a node, as after a forward that raised
        return False


def adopt_pytree_node(kind: type, namespace: str = "torch_remat") -> bool:
    """Make a container type that is registered with torch's own pytrees known to optree; return whether it was unknown.

    Users register their dataclasses where torch.export and FSDP look for them, and optree has another registry.
    """
    node = SUPPORTED_NODES.get(kind)
    if node is None:
        return False

    def unflatten(context: Any, children: Iterable[Any]) -> Any:
        return node.unflatten_fn(list(children), context)

    with contextlib.suppress(ValueError):  # another thread was faster
        optree.register_pytree_node(kind, node.flatten_fn, unflatten, namespace=namespace)
    return True


PYTREE_NAMESPACE = "torch_remat"

# The op by which autograd makes a zero that has no memory, for forward-mode derivatives. Without it the bookkeeping of
# autograd would count as an op of the user's.
ZERO_TENSOR: Any = torch.ops.aten._efficientzerotensor.default

# The sequence number of an autograd node; see `sequence_number`. Called for each saved tensor.
node_number: Callable[[torch.autograd.graph.Node], int] = methodcaller("_sequence_nr")

# Has a function called when an allocation fails, before the allocator raises; None in builds without CUDA. Without it
# `report_on_oom` would report when what filled the memory is gone: torch.cuda's public memory history calls nothing.
attach_oom_observer: Callable[[Callable[[int, int, int, int], None]], None] | None
attach_oom_observer = getattr(torch._C, "_cuda_attachOutOfMemoryObserver", None)

# Whether a profiler records in this thread (torch.profiler, or emit_nvtx and emit_itt). Without it every region would
# have to enter its ranges always, also where nothing records them.
profiler_runs: Callable[[], bool] = torch._C._autograd._profiler_enabled

# A named range in a profile. The public record_function is itself an op, which dispatch modes would see, and takes
# twenty times as long.
ProfilerRange: Callable[[str], AbstractContextManager[Any]]
ProfilerRange = torch._C._profiler._RecordFunctionFast

# Runs a function on placeholders as on plain tensors: by torch's own protocol real results would become placeholders.
without_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass

# As the `__torch_function__` of a subclass: ops leave the class of their results alone, for no time at all.
without_torch_function_ever: Any = torch._C._disabled_torch_function_impl

# Makes a write to the data pointer of a tensor without data an error in C++ code too; without it that is a crash.
forbid_data_access: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr

# The only way to make a tensor subclass without data; documented for subclass authors, though named as private.
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass

# A lazy negative of a tensor, as autograd makes it for the imaginary part of a conjugate; conj() has a public name.
# Without it a placeholder, or an input of a replay, would be no such tensor though forward had one.
negative_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view

# The same for a subclass that shares the memory of another tensor: without it `dtr` could not make views of one that it
# may evict.
make_subclass: Callable[[type, torch.Tensor], Any] = torch.Tensor._make_subclass

# Detaches an ordinary tensor past all dispatch modes, in one call instead of `detach` in `without_dispatch_modes`. Like
# `detach` it shares the version counter.
detached: Callable[[torch.Tensor], torch.Tensor] = partial(torch.Tensor._make_subclass, torch.Tensor)

# Exchanges what two tensor objects are, keeping the objects: the part of torch.utils.swap_tensors that also works for
# tensors that somebody refers to weakly. Without it tensors could not leave a block of `dtr`.
swap_identity: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl

# Whether ops on a tensor come to its class in Python. Without it `dtr` would return views that look plain and are not.
is_dispatched: Callable[[torch.Tensor], bool] = attrgetter("_python_dispatch")

# How many references there are to a tensor in C++: Python's own object is one, autograd's graph holds others.
# Without it `dtr` could not tell which tensors `swap_identity` may exchange.
use_count: Callable[[torch.Tensor], int] = methodcaller("_use_count")

# Runs ops as a dispatch mode's handler does, below autograd, where there is no handler. Without it what `dtr`
# recomputes would get a graph of its own.
below_autograd: Callable[[], AbstractContextManager[Any]] = torch._C._AutoDispatchBelowAutograd

# The node of the backward that runs now in this thread, None outside of one. Without it `dtr` could not tell where a
# backward adds a gradient to a leaf, and `trace` not what is a region's backward.
current_node: Callable[[], torch.autograd.graph.Node | None] = torch._C._current_autograd_node


# What the context managers of gradients call, without their objects: each replay switches twice.
set_grad_enabled: Callable[[bool], object] = torch._C._set_grad_enabled

# The lazy conjugate and negative bits of a tensor. Without them a placeholder would show others than the tensor that it
# stands for.
set_conj: Callable[[torch.Tensor, bool], None] = torch._C._set_conj
set_neg: Callable[[torch.Tensor, bool], None] = torch._C._set_neg


# The address of a tensor's storage object: the identity of what views share, also where it is empty. The public way
# makes a storage object in Python for each.
storage_key: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]


def collective_counter() -> Callable[[], int] | None:
    """Return what counts the collectives of this process with others; None where it is the only rank.

    Those of its accelerator, if there is one: threads that save checkpoints may run some on the CPU at any time.
    Without it a budget under tensor parallelism waits for ever instead of raising.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    counts: dict[int, Callable[[], int]] = {}
    kind = accelerator_type()
    for group in distributed.distributed_c10d._world.pg_map:
        for device in [device for device in group._device_types if device.type == kind and group.size() > 1]:
            backend: Any = group._get_backend(device)
            with contextlib.suppress(RuntimeError):  # some backends do not count
                backend._get_sequence_number_for_group()
                counts[id(backend)] = backend._get_sequence_number_for_group
    return (lambda: sum([count() for count in counts.values()])) if counts else None


def process_groups() -> set[tuple[str, int]]:
    """Return the descriptions and sizes of the groups that this process is in; there is no public list."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return set()
    return {(group.group_desc, group.size()) for group in distributed.distributed_c10d._world.pg_map}


def default_store() -> Any:
    """Return the store by which the ranks have met; without it nobody learns why a rank does not come."""
    return torch.distributed.distributed_c10d._get_default_store()


def after_backward(then: Callable[[], None]) -> None:
    """Do something once the backward that runs in this thread is over; not if it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(then)


_F = TypeVar("_F", bound=Callable[..., Any])


def eager_only(function: _F) -> _F:
    """Mark a function that compiled code cannot call: with ``fullgraph=True`` the compiler's error says so by name.

    It is what ``torch.compiler.disable(reason=...)`` does, which would import the whole compiler.
    """
    reason = f"remat.{function.__name__} is for eager code: call it outside of what torch.compile compiles"
    function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    return function


def keep_from_compiler(function: _F) -> _F:
    """Have the compiler leave a function alone, the functions in it, and all that they call; it costs no call anything.

    Of the functions that a module defines: hooks are called while the compiler looks for code of the user.
    """
    frames = torch._C._dynamo.eval_frame
    code: CodeType = function.__code__
    for one in (code, *(const for const in code.co_consts if isinstance(const, CodeType))):
        frames.set_code_exec_strategy(
            one, frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        )
    return function


def untraced(function: _F) -> _F:
    """Have compiled autograd call a hook of ours as it is: what it runs is a replay, which is no part of the graph."""
    function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg="a region is replayed")
    return keep_from_compiler(function)


# Runs an op, or answers it without. As torch calls a mode's handler it takes the mode, the op, the types of tensor
# subclasses among the arguments, and the arguments.
Handler = Callable[[Any, Any, Sequence[type], Sequence[Any], Mapping[str, Any]], Any]


# Whether a higher-order op compiles a function of its own, or runs what it compiled: eager ``flex_attention`` and
# ``cond`` do, and fail, there or later, if a mode keeps them from it. Torch 2.10 does not tell.
_in_hop_compile: Callable[[], bool] = getattr(_of_higher_order_ops, "_in_hop_compile", lambda: False)


class DispatchMode(TorchDispatchMode):
    """A dispatch mode whose handler the compiler leaves alone, without the Python functions that torch wraps it in.

    They are a fifth of what a mode costs an op. The compiler's own frame evaluation can skip a function and all that
    it calls, which costs nothing.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    # Higher-order ops come to the handler as all others do; without this each is a NotImplementedError of torch's.
    supports_higher_order_operators = True

    # Whether compiled code runs compiled under this mode. Torch asks when the mode goes on the stack.
    lets_compiled_code_run = False

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Answer torch, which asks modes and not their classes.

        What a higher-order op compiles for itself is no code of the user's: its ops come to the mode.
        """
        return self.lets_compiled_code_run or _in_hop_compile()

    @keep_from_compiler
    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op: nothing watches."""
        return op(*args, **(kwargs or {}))

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__torch_dispatch__" in cls.__dict__:
            keep_from_compiler(cls.__torch_dispatch__)


def push_mode(mode: DispatchMode) -> tuple[bool, bool, bool]:
    """Put a mode on the stack, as ``with mode:`` does in five functions; return what `pop_mode` is to be given.

    That is what torch keeps of the modes besides the stack, in variables of a module.
    """
    modules: Any = _python_dispatch
    before = (
        modules._is_in_torch_dispatch_mode,
        modules._is_in_non_infra_torch_dispatch_mode,
        modules._is_in_any_mode_without_ignore_compile_internals,
    )
    modules._is_in_torch_dispatch_mode = modules._is_in_non_infra_torch_dispatch_mode = True
    if not (before[2] or mode.lets_compiled_code_run):
        modules._is_in_any_mode_without_ignore_compile_internals = True
        modules.set_is_in_mode_without_ignore_compile_internals(True)
    torch._C._push_on_torch_dispatch_stack(mode)
    return before


def pop_mode(before: tuple[bool, bool, bool]) -> None:
    """Take the innermost mode off the stack again."""
    modules: Any = _python_dispatch
    torch._C._pop_torch_dispatch_stack(None)
    if not count_of_modes():  # torch keeps one set for all threads: what another one had set would stay for good
        before = (False, False, False)
    modules._is_in_torch_dispatch_mode, modules._is_in_non_infra_torch_dispatch_mode = before[:2]
    if modules._is_in_any_mode_without_ignore_compile_internals != before[2]:
        modules._is_in_any_mode_without_ignore_compile_internals = before[2]
        modules.set_is_in_mode_without_ignore_compile_internals(before[2])


# What ``torch.compile`` makes of a graph with the option ``wrap_inductor_compiled_regions``.
_COMPILED_CODE: Any = torch._higher_order_ops.inductor_compiled_code

# Counts the compiled frames that this thread runs, from 0 on; -1 stops. Torch has no public way to notice that compiled
# code runs, which no dispatch mode sees: of its ops only those that it takes from libraries. Missing before torch 2.13.
_count_frames: Callable[[int], int] | None
_count_frames = getattr(torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)


# All threads share the compiler's stance, so the first that enters sets it, and the last that leaves puts it back.
_eager_lock = Lock()
_forced_eager: list[Any] = []


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Return a context in which code that is compiled, or to be compiled, runs as it is written.

    It does under a dispatch mode, too, but of each function that it comes to then the compiler remembers for good that
    it is not to be compiled. The public ``set_stance`` refuses to be called by compiled code, after a break of its
    graph: so the compiler is switched off for this thread first.
    """
    before = torch._C._dynamo.eval_frame.set_eval_frame(None)
    with _eager_lock:
        stance: Any = _forced_eager[0] if _forced_eager else torch.compiler.set_stance("force_eager")
        if not _forced_eager:
            stance.__enter__()
        _forced_eager.append(stance)
    try:
        yield
    finally:
        with _eager_lock:
            _forced_eager.pop()
            if not _forced_eager:
                stance.__exit__(None, None, None)
        torch._C._dynamo.eval_frame.set_eval_frame(before)


class CompiledCode:
    """A context that notes whether compiled code runs in it.

    Attributes:
        is_noticed: Whether this release of torch notices.
        ran: Whether some ran.
    """

    is_noticed = _count_frames is not None
    ran = False
    _seen = 0

    def __enter__(self) -> None:
        if _count_frames is not None:
            self._before = _count_frames(0)  # which starts nothing anew where something counts already

    def __exit__(self, *_: object) -> None:
        if _count_frames is not None:
            self.ran = _count_frames(0) - self._seen > max(self._before, 0)
            if self._before < 0:
                _count_frames(-1)

    def note_seen(self, op: Any) -> None:
        """Do not count the compiled function that runs now if it is all of a higher-order op, which a mode has seen."""
        if _in_hop_compile() or op is _COMPILED_CODE:
            self._seen += 1

    def so_far(self) -> int:
        """Return how many functions ran compiled so far."""
        return 0 if _count_frames is None else _count_frames(0)

    def forget_since(self, count: int) -> None:
        """Do not count what has run compiled since ``so_far`` returned a number."""
        if _count_frames is not None:
            self._seen += _count_frames(0) - count


def is_compiled(function: Any) -> bool:
    """Whether a function or module is what ``torch.compile`` returns; torch has no public way to ask."""
    return "_torchdynamo_orig_callable" in getattr(function, "__dict__", ()) or (
        isinstance(function, torch.nn.Module)
        and (function._compiled_call_impl is not None or "_orig_mod" in function._modules)
    )


def in_autocast() -> bool:
    """Whether an autocast context is entered; inside of an op the public functions say that none is on."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


# The dispatch modes that are on the stack now: the one whose handler runs is not. Without them a region's mode would be
# put there twice, and see each op twice.
active_modes: Callable[[], list[TorchDispatchMode]] = torch.utils._python_dispatch._get_current_dispatch_mode_stack

# How many these are, in a call that costs next to nothing.
count_of_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


@cache
def casts_the_last_first() -> bool:
    """Whether autocast casts the last argument of a function first: as the compiler that built torch evaluates them.

    A thread of its own finds out, where no hooks and modes of a region are. It enters no context of autocast: to leave
    one empties the cache of casts, which all threads share.
    """
    found: list[bool] = []
    thread = Thread(target=lambda: found.append(_casts_the_last_first()))
    thread.start()
    thread.join()
    return found[0]


def _casts_the_last_first() -> bool:
    torch.set_autocast_cache_enabled(False)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    torch.set_autocast_enabled("cpu", True)
    with torch.enable_grad():
        one = torch.zeros(1, 1, requires_grad=True, device="cpu").clone()
        made: Any = torch.mm(one, one).grad_fn
    first, last = (node for node, _ in made.next_functions)
    return node_number(first) > node_number(last)


# Whether autocast is on for any device type. The public function asks for one, and a region may use several.
any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


def kernel_of(op: Any) -> Callable[..., Any]:
    """Return what an op of torch's own calls, without the Python function around it: a tenth of a small op's time."""
    kernel: Callable[..., Any] = getattr(op, "_op", op)
    return kernel


def dispatch_state() -> tuple[Any, Any]:
    """Return which dispatch keys this thread includes and excludes: autograd, autocast, modes."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def with_dispatch_state(state: tuple[Any, Any]) -> AbstractContextManager[Any]:
    """Return a context with an earlier state, and with the modes that are active now.

    Inside of an op autograd is switched off, so that ops of several parts would come whole.
    """
    included, excluded = state
    present = torch._C._dispatch_tls_local_include_set()
    guard: AbstractContextManager[Any] = torch._C._ForceDispatchKeyGuard(included | present, excluded)
    return guard


def with_shared_versions() -> AbstractContextManager[Any]:
    """Return a context in which `detach` shares the version counter, which it does not inside of an op."""
    guard: AbstractContextManager[Any] = torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.ADInplaceOrView, False
    )
    return guard


# Whether a tensor is a subclass that wraps other tensors and can be taken apart and rebuilt, such as DTensor. Without
# it no placeholder could stand for one.
is_traceable_wrapper: Callable[[object], bool] = torch.utils._python_dispatch.is_traceable_wrapper_subclass

# Runs an op past all dispatch modes. What the hooks of checkpointing do to a tensor is no op of the user's.
without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = torch._C._DisableTorchDispatch

# Runs ops past all dispatch modes, but still by the `__torch_dispatch__` of tensor subclasses.
without_modes: Callable[[], AbstractContextManager[Any]] = torch.utils._python_dispatch._disable_current_modes


def without_modes_for(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Return the same for ops on one tensor, of any type: below a wrapper's own dispatch there is no memory."""
    guard: AbstractContextManager[Any] = without_dispatch_modes() if type(tensor) is torch.Tensor else without_modes()
    return guard


# torch disables __torch_function__ while ``backward`` is called on a tensor subclass; replay is to run as forward did.
torch_function_is_on: Callable[[], bool] = torch._C._is_torch_function_enabled
with_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C._EnableTorchFunction

# The stack of modes for torch functions, of which torch itself takes one off while it runs a handler.
pop_function_mode: Callable[[], TorchFunctionMode] = torch._C._pop_torch_function_stack
push_function_mode: Callable[[TorchFunctionMode], None] = torch._C._push_on_torch_function_stack


def innermost_function_mode() -> TorchFunctionMode | None:
    """Return the mode for torch functions that sees a function first; None if no mode is active."""
    depth = function_mode_depth()
    return torch._C._get_function_stack_at(depth - 1) if depth else None


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set a tensor's version counter; torch's own context manager for this has no way to be left later.

    Without it autograd would take what a replay skips, or puts back, for an in-place modification.
    """
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


# The base of all batch norms, which in training read none of their statistics, and write them uncounted. Without it a
# policy by op would take them for state.
BATCH_NORM: type = torch.nn.modules.batchnorm._BatchNorm

# The types of the two contexts that torch's create_selective_checkpoint_contexts returns: a library may hand on no more
# than them, and the policy is in the first.
SELECTIVE_CONTEXTS = (
    torch.utils.checkpoint._CachingTorchDispatchMode,
    torch.utils.checkpoint._CachedTorchDispatchMode,
)


def torch_checkpoint_switches() -> dict[str, bool]:
    """Return what ``set_checkpoint_early_stop`` and ``set_checkpoint_debug_enabled`` have set.

    Both set global variables of ``torch.utils.checkpoint``. Without these `drop_in` would not follow the two functions.
    """
    module: Any = torch.utils.checkpoint
    found = {"early_stop": module._enable_checkpoint_early_stop, "debug": module._checkpoint_debug_enabled}
    return {option: value for option, value in found.items() if value is not None}


def op_of(value: Any) -> Any:
    """Return the op of what `torch.library.custom_op` made of a function; any other value as it is."""
    return value._opoverload if isinstance(value, CustomOpDef) else value


# Whether an op is registered to have ordered effects, as printing has. Without it `never_replay_effects` would repeat
# them.
has_effect: Callable[[Any], bool] = has_effects


def ranks_of_group(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group, as an op of a collective gets it: by name, or in a torch object."""
    import torch.distributed as dist

    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def without_work(value: Any) -> Any:
    """Return a finished work for that of a collective, which holds tensors, and any other value itself."""
    if type(value) is not torch.ScriptObject or value._type().qualified_name() != "__torch__.torch.classes.c10d.Work":
        return value
    future: torch.futures.Future[list[Any]] = torch.futures.Future()
    future.set_result([])
    c10d: Any = torch._C._distributed_c10d  # whose stubs differ between releases
    return c10d._create_work_from_future(future).boxed()


def past_the_compiler(error: Exception) -> Exception:
    """Return an error that reaches the caller of compiled code as what it is.

    Of what is raised while the compiler traces a graph it makes a ``BackendCompilerFailed``, but not of errors of this
    kind; torch has no public way to say that.
    """
    from torch._dynamo.exc import ShortenTraceback  # not at the top: it imports the whole compiler

    kind: Any = type(type(error).__name__, (type(error), ShortenTraceback), {"__module__": type(error).__module__})
    passed: Exception = kind.__new__(kind, *error.args)
    of_the_compiler = ("first_useful_frame", "_torch_dynamo_tracer_output", "frame_exec_strategy")
    passed.__dict__.update(vars(error), **dict.fromkeys(of_the_compiler))
    return passed


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory that is no view to autograd; nothing public makes one with a `grad_fn`."""
    with without_dispatch_modes():
        alias: torch.Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return alias


# What FSDP does to parameters, by module, class and methods: it gathers them and frees them, in hooks of the modules
# that it shards. Where such a module is in a region, its hooks run the same ops as user code does, and only in the
# phase that finds the parameters sharded. Neither torch nor the ops tell which ops these are.
_FSDP_WORK = {
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": (
        "FSDPParamGroup",
        ("lazy_init", "unshard", "wait_for_unshard", "reshard"),
    ),
    "torch.distributed.fsdp._flat_param": (
        "FlatParamHandle",
        ("pre_unshard", "unshard", "post_unshard", "reshard", "post_reshard"),
    ),
}


# What the first FSDP, and `torch.compile`, call the module that they wrap.
WRAPPED_BY_FSDP1, WRAPPED_BY_COMPILE = "_fsdp_wrapped_module", "_orig_mod"


def is_wrapper_of_fsdp1(module: torch.nn.Module) -> bool:
    """Whether a module is the first FSDP's wrapper; its class would import all of FSDP."""
    return WRAPPED_BY_FSDP1 in module._modules


def run_fsdp_in(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Have FSDP's work on parameters run in a context from now on, if FSDP is in use; the first call counts."""
    if not any(map(sys.modules.__contains__, _FSDP_WORK)) or not torch.distributed.is_initialized():
        return
    for name in [name for name in _FSDP_WORK if name in sys.modules]:
        kind, methods = _FSDP_WORK.pop(name, ("", ()))  # another thread may be faster
        owner = getattr(sys.modules[name], kind, None)
        for method in methods:
            if (work := getattr(owner, method, None)) is not None:
                setattr(owner, method, _within(context, work))


def _within(context: Callable[[], AbstractContextManager[Any]], work: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(work)
    def work_in_context(*args: Any, **kwargs: Any) -> Any:
        with context():
            return work(*args, **kwargs)

    return work_in_context


# Which forward hooks were registered with ``always_call=True``, and which of torch's functions runs a module that has
# hooks. Without them the exception that ends a replay would pass such a hook, which closes what a pre-hook has opened.
_CALL = torch.nn.Module._call_impl.__code__
_CALL_WITH_HOOKS = next((one for one in _CALL.co_consts if getattr(one, "co_name", "") == "inner"), _CALL)


def is_under_always_called_hooks(until: CodeType) -> bool:
    """Whether a module that runs has such a hook, up to the frame of a certain function."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not until:
        if frame.f_code is _CALL_WITH_HOOKS and (
            torch.nn.modules.module._global_forward_hooks_always_called
            or frame.f_locals["self"]._forward_hooks_always_called
        ):
            return True
        frame = frame.f_back
    return False
