"""Views of placeholders: every view of torch gives a placeholder with the metadata that the true view has.

What a view is, torch's schemas say: an output that aliases the first argument, which is not written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torch_remat as remat
from tests.helpers import pairwise, tensors_in
from torch_remat.dispatch.placeholder import Source, make_placeholder

SOURCE = Source("block", "op", "out")


def metadata(tensor: Tensor) -> dict[str, Any]:
    """Return what a caller can ask of a tensor without reading its data."""
    return {
        "shape": tensor.shape,
        "stride": tensor.stride(),
        "offset": tensor.storage_offset(),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "requires_grad": tensor.requires_grad,
        "grad_fn": type(tensor.grad_fn).__name__,
        "conj": tensor.is_conj(),
        "neg": tensor.is_neg(),
        "contiguous": tensor.is_contiguous(),
    }


def assert_passed_on(expected: Any, actual: Any) -> None:
    """Assert that a call gave placeholders, with the metadata of the true views."""
    wanted, found = tensors_in(expected), tensors_in(actual)
    assert len(found) == len(wanted)
    assert type(actual) is type(expected) or remat.is_placeholder(actual)
    for view, placeholder in zip(wanted, found, strict=True):
        assert remat.is_placeholder(placeholder)
        assert metadata(placeholder) == metadata(view)
        with pytest.raises(remat.PlaceholderError) as caught:
            placeholder.clone()
        assert (caught.value.region, caught.value.op, caught.value.tensor) == SOURCE[:3]


# The ops that torch's schemas call views

LIKES = {
    "float": lambda: torch.randn(2, 3, 4),
    "offset": lambda: torch.randn(3, 3, 5)[1:, :, 1:],
    "square": lambda: torch.randn(3, 3).t(),
    "ones": lambda: torch.randn(1, 3, 1),
    "scalar": lambda: torch.randn(()),
    "pairs": lambda: torch.randn(3, 2),
    "complex": lambda: torch.randn(2, 3, dtype=torch.complex64),
    "integer": lambda: torch.arange(6).view(2, 3),
}
# Arguments that a schema has no default for, by name.
ARGUMENTS: dict[str, Callable[[Tensor], Any]] = {
    "size": lambda x: list(x.shape),
    "shape": lambda x: list(x.shape),
    "input_shape": lambda x: list(x.shape),
    "sizes": lambda x: [1, x.shape[0]],
    "split_sizes": lambda x: [1, x.shape[0] - 1],
    "stride": lambda x: list(x.stride()),
    "dims": lambda x: list(reversed(range(x.dim()))),
    "dim": lambda x: 0,
    "dim0": lambda x: 0,
    "dim1": lambda x: 1,
    "axis0": lambda x: 0,
    "axis1": lambda x: 1,
    "source": lambda x: 0,
    "destination": lambda x: 1,
    "dimension": lambda x: 0,
    "normalized_ndim": lambda x: x.dim() - 1,
    "ndim": lambda x: x.dim() + 1,
    "start": lambda x: 1,
    "length": lambda x: 1,
    "index": lambda x: -1,
    "step": lambda x: 1,
    "chunks": lambda x: 2,
    "sections": lambda x: 2,
    "split_size": lambda x: 1,
    "indices": lambda x: [1],
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "cpu_dtype": lambda x: x.dtype,
    "cuda_dtype": lambda x: x.dtype,
    "cuda_enabled": lambda x: False,
    "cpu_enabled": lambda x: False,
    "level": lambda x: 0,
}
BY_KIND: dict[tuple[str, str], Callable[[Tensor], Any]] = {
    ("start", "Tensor"): lambda x: torch.tensor(1),
    ("tensor_indices_or_sections", "Tensor"): lambda x: torch.tensor([1]),
    ("size", "int"): lambda x: 1,
    ("dim", "List[int]"): lambda x: [0, -1],
    ("split_size", "List[int]"): lambda x: [1, x.shape[0] - 1],
    ("source", "List[int]"): lambda x: [0],
    ("destination", "List[int]"): lambda x: [1],
}


def is_view_schema(schema: Any) -> bool:
    """Whether a schema says that tensors come out which alias an argument, and that nothing is written."""
    tensors = all(str(value.type) in ("Tensor", "List[Tensor]") for value in schema.returns)
    aliases = any(value.alias_info is not None for value in schema.returns)
    writes = any(value.alias_info is not None and value.alias_info.is_write for value in schema.arguments)
    first = bool(schema.arguments) and str(schema.arguments[0].type) == "Tensor"
    return schema.name.startswith("aten::") and tensors and aliases and first and not writes


SCHEMAS = [schema for schema in torch._C._jit_get_all_schemas() if is_view_schema(schema)]  # noqa: TID251


def name_of(schema: Any) -> str:
    """Return `transpose.int` for a schema."""
    return ".".join(filter(None, (schema.name.removeprefix("aten::"), schema.overload_name)))


def calls_of(schema: Any) -> list[tuple[str, Callable[[Tensor], Any]]]:
    """Return the names of the tensors that an op makes a view of, each with the op's call for such a tensor."""
    op = getattr(getattr(torch.ops.aten, schema.name.removeprefix("aten::")), schema.overload_name or "default")
    calls = []
    for name, make in LIKES.items():
        like = make()
        try:
            args, kwargs = arguments_of(schema, like)
            views = tensors_in([op(like, *args, **kwargs)])
        except Exception:
            continue  # not for such a tensor, or not in this build of torch
        storage = like.untyped_storage()._cdata
        if views and all(v.layout is torch.strided and v.untyped_storage()._cdata == storage for v in views):
            calls.append((name, lambda x, args=args, kwargs=kwargs: op(x, *args, **kwargs)))
    return calls


def arguments_of(schema: Any, like: Tensor) -> tuple[list, dict]:
    """Return values for the arguments after the first that have no default."""
    args, kwargs = [], {}
    for argument in schema.arguments[1:]:
        if argument.has_default_value():
            continue
        make = BY_KIND.get((argument.name, str(argument.type))) or ARGUMENTS.get(argument.name)
        value = make(like) if make else torch.zeros_like(like) if str(argument.type) == "Tensor" else None
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.filterwarnings("ignore")
def test_what_torch_calls_a_view_is_passed_on(schema):
    calls = calls_of(schema)
    if not calls:
        pytest.skip("views no dense tensor on the CPU")
    for name, call in calls:
        like = LIKES[name]()
        assert_passed_on(call(like), call(make_placeholder(like, SOURCE)))


@pytest.mark.filterwarnings("ignore")
def test_most_views_of_torch_are_tried():
    tried = {name_of(schema) for schema in SCHEMAS if calls_of(schema)}
    assert len(tried) > 70
    assert tried >= {
        "split.Tensor",
        "split.sizes",
        "unbind.int",
        "unfold",
        "_conj",
        "view.dtype",
        "as_strided",
        "expand",
        "slice.Tensor",
    }


# Views as users write them

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "index": lambda x: x[1],
    "slices": lambda x: x[..., 1:, ::2],
    "none": lambda x: x[None, :, None],
    "view": lambda x: x.view(-1, 4),
    "reshape": lambda x: x.reshape(6, 4),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(2, (2, 2)),
    "T": lambda x: x.mT,
    "permute": lambda x: x.permute(2, 0, 1),
    "movedim": lambda x: x.movedim(0, 2),
    "expand": lambda x: x[:, :1].expand(2, 5, 4),
    "broadcast": lambda x: torch.broadcast_to(x, (5, 2, 3, 4)),
    "broadcast with a real one": lambda x: torch.broadcast_tensors(x, torch.zeros(5, 1, 1, 1))[0],
    "squeeze": lambda x: x[:1].squeeze(),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 3), 5),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "split": lambda x: x.split([1, 3], -1),
    "chunk": lambda x: x.chunk(2, -1),
    "unbind": lambda x: x.unbind(1),
    "tensor_split": lambda x: x.tensor_split(2, dim=2),
    "view as": lambda x: x.view_as(torch.zeros(6, 4)),
    "bits": lambda x: x.detach().view(torch.int32),
    "pairs": lambda x: torch.view_as_complex(x.view(2, 3, 2, 2)),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "alias": lambda x: x.view(x.shape),
    "contiguous": lambda x: x.contiguous(),
    "to what it is": lambda x: x.to(torch.float32),
    "positive": lambda x: +x,
    "atleast": lambda x: torch.atleast_3d(x),
    "iteration": lambda x: list(x),
    "dropout in evaluation": lambda x: nn.functional.dropout(x, 0.5, training=False),
    "identity": lambda x: nn.Identity()(x),
    "flatten module": lambda x: nn.Flatten()(x),
}


def pair(requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    """Return a tensor with strides of its own and its placeholder."""
    like = torch.randn(2, 3, 4).transpose(0, 1).contiguous().transpose(0, 1).contiguous()
    return like.requires_grad_(requires_grad), make_placeholder(like.detach(), SOURCE).requires_grad_(requires_grad)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["without grad", "with grad"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_view_has_the_metadata_of_the_true_view(view, requires_grad):
    like, placeholder = pair(requires_grad)
    assert_passed_on(view(like), view(placeholder))


@pairwise(view=VIEWS.values(), mode=[torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_view_made_under_another_grad_mode_is_passed_on(view, mode):
    like, placeholder = pair()
    if mode is torch.inference_mode and view is VIEWS["dropout in evaluation"]:
        pytest.skip("inference mode makes a copy there, which reads")
    with mode():
        assert_passed_on(view(like), view(placeholder))


STEPS = (
    lambda x: x.transpose(0, -1),
    lambda x: x[..., 1:],
    lambda x: x[1:],
    lambda x: x[..., ::2],
    lambda x: x.unsqueeze(0),
    lambda x: x.squeeze(0),
    lambda x: x.diagonal(0, 0, -1),
    lambda x: x.flatten(),
    lambda x: x.expand(2, *x.shape),
    lambda x: x.unbind(0)[-1],
    lambda x: x.chunk(2, -1)[-1],
    lambda x: x.unfold(-1, 2, 1),
    lambda x: x.reshape(-1, 2),
    lambda x: x.as_strided((2,), (1,), x.storage_offset() + 1),
    lambda x: x.view(torch.int32),
    lambda x: x.view(torch.float32),
    lambda x: x.detach(),
    lambda x: x.permute(tuple(reversed(range(x.dim())))),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(range(len(STEPS))), max_size=8))
def test_chains_of_views_keep_true_metadata(steps):
    like = torch.arange(120.0).view(4, 6, 5)
    placeholder = make_placeholder(like, SOURCE)
    for step in steps:
        try:
            longer = STEPS[step](like)
        except (RuntimeError, IndexError):
            continue  # no such view of this tensor
        if longer.untyped_storage()._cdata != like.untyped_storage()._cdata:
            with pytest.raises(remat.PlaceholderError):
                STEPS[step](placeholder)
            continue
        like, placeholder = longer, STEPS[step](placeholder)
        assert_passed_on(like, placeholder)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: x.transpose_(0, 1),
        lambda x: x.squeeze_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.swapaxes_(0, 1),
        lambda x: x.as_strided_((2,), (1,)),
        lambda x: x.resize_(1),
        lambda x: x.resize_as_(torch.zeros(1)),
        lambda x: x.set_(torch.zeros(3)),
        lambda x: x.set_(),
        lambda x: x.detach_(),
    ],
)
def test_change_of_metadata_in_place_is_true_or_refused(change):
    like = torch.randn(3, 4)
    placeholder = make_placeholder(like, SOURCE)
    before = metadata(placeholder)
    try:
        changed = change(placeholder)
    except remat.PlaceholderError:
        assert metadata(placeholder) == before
    else:
        assert changed is placeholder
        assert_passed_on(change(like), placeholder)


def test_wrong_view_raises_as_the_true_one_does():
    like, placeholder = pair()
    for view in (lambda x: x.view(5), lambda x: x[7], lambda x: x.squeeze(9), lambda x: x.expand(3, 3, 4)):
        with pytest.raises((RuntimeError, IndexError)) as true:
            view(like)
        with pytest.raises(type(true.value)) as caught:
            view(placeholder)
        assert not isinstance(caught.value, remat.RematError)
