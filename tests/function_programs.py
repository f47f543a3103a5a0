"""Programs for policies by function and by price: what code does with a result, and where it calls a function.

Each is named after what it does, and lists the functions of a policy that selects some of its calls. Those without a
list would be wrong if one check of a kept or skipped call were missing.
"""

from __future__ import annotations

import contextlib
import threading

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import torch_remat as remat

PROGRAMS = {}
OTHERS = torch.linspace(0.3, -1.4, 16, dtype=torch.float64).view(4, 4)
NORM = nn.BatchNorm1d(4).double()
ATTENTION = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True).double()
TABLE = nn.Embedding(4, 4, max_norm=0.5).double()
MEMORY = nn.LSTM(4, 4, 2, dropout=0.3).double()
MODULES = nn.ModuleList([NORM, ATTENTION, TABLE, MEMORY])


class Calls:
    """State of a program: how often it ran in a step, and what it remembers."""

    count, cache = 0, None


def program(*functions):
    """Make a function a program, under a policy that names functions."""

    def add(function):
        PROGRAMS[function.__name__] = function, list(functions)
        return function

    return add


# --- What is done with a result.


@program(torch.matmul)
def written_through_data(x, w):
    a = x @ w
    a.data.mul_(0.5)
    return (a * 3).exp() + (a * 2).tanh()


@program(torch.matmul)
def written_by_numpy(x, w):
    a = x @ w
    array = a.detach().numpy()
    array *= 0.5
    return (a * 3).exp() + (a * 2).tanh()


@program(torch.matmul)
def written_by_dlpack(x, w):
    a = x @ w
    torch.from_dlpack(a.detach()).mul_(0.5)
    return (a * 3).exp() + (a * 2).tanh()


@program(torch.exp)
def saved_and_written_through_data(x, w):
    a = x.exp()
    a.data.mul_(0.5)
    return a * w + (a * 2).sin()


@program(torch.matmul)
def given_other_data(x, w):
    a = (x @ w).detach()
    a.data = (x * 3).detach()
    return (x * a).exp()


class Dirty(torch.autograd.Function):
    """Changes its argument past the dispatcher, and says so."""

    @staticmethod
    def forward(ctx, x):
        array = x.detach().numpy()
        array *= 2.0
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 2.0


class Quiet(Dirty):
    """Does so without a word."""

    @staticmethod
    def forward(ctx, x):
        array = x.detach().numpy()
        array *= 2.0
        return x.view_as(x)


@program(torch.matmul)
def written_by_a_function_that_says_so(x, w):
    q = Dirty.apply(x @ w)
    return q.sin() + (q * 2).exp()


@program(torch.matmul)
def written_by_a_function_that_does_not(x, w):
    q = Quiet.apply(x @ w)
    return q.sin() + (q * 2).exp()


# --- What a chosen function does and returns.


@program(torch.addcmul)
def writes_by_out(x, w):
    c = x.detach() * 1.0
    torch.addcmul(c, c, c, out=c)
    return (x @ w) * c + (x * c).exp()


@program(torch.Tensor.view, torch.Tensor.transpose, torch.t)
def returns_a_view(x, w):
    a = x * 2
    v = a.view(16)
    a.mul_(0.5)
    return (v * 3).exp().view(4, 4) + (a * 2).tanh().t()


@program(F.dropout)
def returns_its_argument(x, w):
    a = x * 2
    d = F.dropout(a, 0.5, training=False)
    d.mul_(0.5)
    return (a * 3).exp() + (d * 2).tanh()


@program(F.dropout, torch.dropout, F.scaled_dot_product_attention)
def draws(x, w):
    a = F.dropout(x * 1.0, 0.5) + F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3)[0]
    return (a * 2).sin() + (x + torch.randn(4, 4, dtype=x.dtype)).exp()


@program(torch.sort, torch.max)
def returns_named_tuples(x, w):
    found = x.sort(-1)
    return found.values.sin() + (found.values * found.indices).exp() + x.max(-1, keepdim=True).values


@program(torch.Tensor.split, torch.Tensor.unbind, torch.chunk)
def returns_lists_of_views(x, w):
    one, other = (x * 1.0).split(2)
    return torch.cat([other.sin(), one]) + x.unbind(0)[0]


@program(torch.Tensor.item, torch.sum, torch.Tensor.masked_fill)
def returns_a_number(x, w):
    a = x.masked_fill(x.detach() > 0, 0.3)
    return (x * a.sum().item()).exp() + a @ w


@program(torch.softmax, F.layer_norm, F.gelu, F.silu, F.normalize)
def runs_in_python(x, w):
    return F.normalize(F.layer_norm(F.silu((x @ w).softmax(-1)), (4,)) + F.gelu(x)).exp()


@program(torch.Tensor.clone, torch.Tensor.contiguous, torch.Tensor.to, torch.Tensor.float)
def may_return_its_argument(x, w):
    return (x.contiguous().to(torch.float64) * x.t().contiguous()).clone().float().exp()


@program(torch.zeros, torch.ones_like, torch.arange)
def makes_tensors_of_nothing(x, w):
    return (x * torch.zeros(4, 4, dtype=x.dtype).add_(2) + torch.ones_like(x)).exp() * torch.arange(4)


@program(torch.einsum)
def transposed_argument(x, w):
    a = x * 2
    return torch.einsum("ij,kj->ik", a, a).exp() + (x * 3).sin()


@program(F.linear)
def beside_a_batch_norm(x, w):
    return (F.linear(x, w) * NORM.running_mean).exp() + NORM(x * 1.0)


@program(torch.complex, torch.conj, torch.real)
def complex_numbers(x, w):
    z = torch.complex(x, x * 2)
    a = z.conj() * z
    return (a.sin() * a).real


@program(torch.matmul)
def sparse_argument(x, w):
    return (torch.eye(4, dtype=x.dtype).to_sparse() @ (x * 1.0)).exp()


# --- Where a call stands.


@program(torch.matmul, torch.sin)
def under_a_transform(x, w):
    return torch.vmap(lambda row: (row.sin() @ w).exp())(x * 1.0) @ w


@program(F.linear)
def in_inference_mode(x, w):
    with torch.inference_mode():
        known = F.linear(x * 2, w).abs()
    return F.linear(x * 1.0, w).sin() * float(known.sum() > -1e9)


@program(torch.matmul)
def with_a_gradient_taken_inside(x, w):
    z = (x @ w).detach().requires_grad_()
    (grad,) = torch.autograd.grad((z.sin() * z).sum(), z)
    return (x * grad).exp()


@program(torch.matmul, torch.exp)
def in_an_op_and_a_native_region(x, w):
    a = remat.op(lambda x: (x @ w).exp(), "op")(x * 1.0)
    b = remat.native_save_region("native", lambda: (x @ w).exp())
    return remat.op(torch.matmul, "again", policy=remat.CheckpointPolicy.RECOMPUTE)(a, b).sin() + a @ w


@program(torch.matmul)
def that_raises(x, w):
    with contextlib.suppress(RuntimeError):
        torch.matmul(x, w[:3])
    return (x @ w).exp()


@program(torch.matmul)
def called_more_often_in_replay(x, w):
    if remat.is_recomputing():
        _ = x.detach() @ w.detach()
    a = x @ w
    return a.sin() + (x * (a @ w)).tanh()


@program(F.linear, F.scaled_dot_product_attention)
def multi_head_attention(x, w):
    return ATTENTION(x[None], x[None], x[None], need_weights=False)[0][0].exp()


@program(torch.matmul)
def a_mode_of_the_users(x, w):
    with torch.device("cpu"):
        return (x @ w + torch.ones(4, 4)).exp()


# --- What reads results without an op, whose error user code may swallow.


READS = {
    "numpy": lambda a: a.numpy().sum(),
    "list": lambda a: sum(a.tolist()[0]),
    "number": lambda a: float(a.sum()),
}
for how, read in READS.items():

    def an_error_is_swallowed(x, w, read=read):
        a, k = x * 2, 3.0
        with contextlib.suppress(Exception):
            k = 2.0 if read(a.detach()) > -1e9 else 1.0
        return (x @ w) + (x * k).exp()

    PROGRAMS[f"an_error_is_swallowed_{how}"] = an_error_is_swallowed, []


@program()
def an_error_of_linalg_is_swallowed(x, w):
    a, k = x * 2, 2.0
    with contextlib.suppress(RuntimeError):
        torch.linalg.cholesky(a.detach() - 10 * torch.eye(4, dtype=x.dtype))
        k = 1.0
    return (a * k).exp()


@program()
def the_address_is_read(x, w):
    a = x * 2
    return (x @ w) + (x * (2.0 if a.data_ptr() else 3.0)).exp()


@program()
def the_type_is_read(x, w):
    a = x * 2
    return (x @ w) + (x * (2.0 if isinstance(a, Tensor) and a.is_floating_point() else 3.0)).exp()


@program()
def the_history_is_read(x, w):
    a = x @ w
    return a + (x * (2.0 if a.requires_grad else 3.0)).exp()


@program()
def the_identity_is_read(x, w):
    a = x * 2
    seen = {id(a): 1.0}
    return (a * seen.get(id(a), 3.0)).exp()


@program()
def a_comparison_with_a_number(x, w):
    a = (x * 2).detach()
    return torch.where((a != 1) & (a == a) & (a >= -9) & a.__le__(9), x, x * 3).exp()


# --- What is written, and when.


@program()
def a_storage_is_shared(x, w):
    a = (x @ w).detach()
    torch.empty(0, dtype=x.dtype).set_(a.untyped_storage()).mul_(2.0)
    return (x * a).exp()


@program()
def a_detached_result_is_written(x, w):
    a = x * 2
    d = a.detach()
    a.data.mul_(0.5)
    return (d * x).exp()


@program()
def a_mask_requires_a_gradient(x, w):
    with torch.no_grad():
        mask = x @ w
    return (mask.requires_grad_() * x).exp()


@program()
def a_table_renorms_its_rows(x, w):
    return TABLE(torch.tensor([0, 1, 2, 3])) * x + (x * 2).exp()


def _of_others(x, held):
    if has_torch_function((x, held)):
        return handle_torch_function(_of_others, (x, held), x, held)
    with torch.no_grad():
        held.mul_(2.0)
    return x.sin()


@program()
def a_function_of_others_writes_an_argument(x, w):
    held = x.detach() * 1.0
    y = _of_others(x * 1.0, held)
    return (x * held).exp() + y * held


@program()
def a_later_call_takes_the_place_of_another(x, w):
    Calls.count += 1
    if Calls.count % 2 == 0:
        _ = x.detach() @ OTHERS
    a = x.detach() @ w.detach()
    return (a * x).exp() * a.sin()


# --- What is drawn, where it is called.


@program()
def noise_of_like(x, w):
    a = torch.rand_like(x) * x
    return (a + torch.bernoulli(torch.full_like(x, 0.3))).exp() * torch.randperm(4)


@program()
def in_another_thread(x, w):
    out, a = [], x * 2

    def work():
        with contextlib.suppress(remat.PlaceholderError), torch.enable_grad():
            out.append((a.sin() * a).exp())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return out[0] + (x @ w).sin() * a


class Keeps(torch.autograd.Function):
    """Runs functions in its forward, and saves what they make."""

    @staticmethod
    def forward(ctx, x):
        y = x.sin()
        ctx.save_for_backward(y, y * 2)
        return y * 2 + 0.0

    @staticmethod
    def backward(ctx, grad):
        y, z = ctx.saved_tensors
        return grad * y * z


@program()
def in_a_custom_function(x, w):
    return Keeps.apply(x + 1) * (x.sin() * 2).exp()


@program()
def in_a_memory(x, w):
    return MEMORY(x[None])[0][0] @ w


@program()
def with_hooks_on_results(x, w):
    a = x * 2
    a.register_hook(lambda grad: grad * 3)
    a.retain_grad()
    return a.sin() + (a * 2).exp()


@program()
def lists_and_views(x, w):
    a, b = torch.stack([x, x * 2]).unbind()
    c, d = torch.chunk(a.sin() @ w, 2)
    values, places = torch.topk(b.exp(), 2)
    return torch.cat([c, d]) * b + (values * places).sum() + torch.linalg.slogdet(a @ a + 9).logabsdet


# --- What is otherwise in replay.


@program()
def a_cache_is_filled_in_forward(x, w):
    if Calls.cache is None:
        Calls.cache = x.detach() @ OTHERS
    a = x @ w
    return a.sin() + (a @ w).exp() + Calls.cache * x


@program()
def a_cache_takes_the_place_of_another_call(x, w):
    if Calls.cache is None:
        Calls.cache = x.detach() @ OTHERS
    a = x.detach() @ w.detach()
    return (a * x).exp() + Calls.cache * x


@program()
def a_constant_takes_the_place_of_another(x, w):
    if Calls.cache is None:
        Calls.cache = torch.full((4, 4), 2.0, dtype=x.dtype)
    return (x * torch.full((4, 4), 3.0, dtype=x.dtype)).exp() + Calls.cache * x


@program()
def a_factor_takes_the_place_of_another(x, w):
    if Calls.cache is None:
        Calls.cache = x.detach() * 2
    return x * (x.detach() * 3) + Calls.cache.exp() * x


def gradients(function):
    """Return what two backwards of a program give, and how it leaves buffers and generators."""
    torch.manual_seed(3)
    with torch.no_grad():
        NORM.reset_running_stats()
        TABLE.weight.copy_(OTHERS)
    Calls.count, Calls.cache = 0, None
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).requires_grad_()
    w = torch.linspace(1, -2, 16, dtype=torch.float64).view(4, 4).t().contiguous().requires_grad_()
    y = function(x * 1.0, w)
    results, leaves = [y.detach().clone()], [x, w, *MODULES.parameters()]
    for keep in (True, False):
        found = torch.autograd.grad(y.double().cos().sum(), leaves, allow_unused=True, retain_graph=keep)
        results += [torch.zeros(()) if one is None else one for one in found]
    return [*results, *MODULES.buffers(), torch.get_rng_state()]
