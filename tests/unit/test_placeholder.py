"""What a placeholder says of itself, real tensors made from its metadata, errors, lifetimes, views."""

from __future__ import annotations

import contextlib
import textwrap
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import collector_off, pairwise, tensors_in
from torch_remat.dispatch.placeholder import Source, make_placeholder

SOURCE = Source("block.3", "attention", "out")

LIKES = {
    "matrix": lambda: torch.randn(2, 3),
    "scalar": lambda: torch.randn(()),
    "transposed": lambda: torch.randn(2, 3).t(),
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bool": lambda: torch.tensor([True]),
    "complex": lambda: torch.randn(3, dtype=torch.complex128),
    "float8": lambda: torch.zeros(3).to(torch.float8_e4m3fn),
    "overlapping": lambda: torch.randn(9).as_strided((4, 4), (1, 1), 2),
}


def placeholder(like=None):
    return make_placeholder(torch.randn(2, 3) if like is None else like, SOURCE)


def refused(consume, *args):
    """Return the PlaceholderError that a call must raise."""
    with pytest.raises(remat.PlaceholderError) as caught:
        consume(*args)
    return caught.value


# Metadata

QUESTIONS = {
    "shape": lambda x: x.shape,
    "size": lambda x: (x.size(), [x.size(d) for d in range(x.dim())]),
    "stride": lambda x: x.stride(),
    "offset": lambda x: x.storage_offset(),
    "dtype": lambda x: (x.dtype, x.is_floating_point(), x.is_complex(), x.is_signed(), x.type()),
    "device": lambda x: (x.device, x.get_device(), x.is_cpu, x.is_cuda, x.is_meta),
    "layout": lambda x: (x.layout, x.is_sparse, x.is_nested, x.is_quantized),
    "dim": lambda x: (x.dim(), x.ndim, x.ndimension()),
    "numel": lambda x: (x.numel(), x.nelement(), torch.numel(x)),
    "bytes": lambda x: (x.element_size(), x.itemsize, x.nbytes),
    "contiguous": lambda x: (x.is_contiguous(), x.is_contiguous(memory_format=torch.channels_last)),
    "bits": lambda x: (x.is_conj(), x.is_neg()),
    "autograd": lambda x: (x.requires_grad, x.is_leaf, x.grad_fn, x.grad, x.output_nr, x._version),
}


@pytest.mark.parametrize("like", LIKES.values(), ids=LIKES)
def test_metadata_is_true(like):
    tensor = like()
    for name, ask in QUESTIONS.items():
        assert ask(placeholder(tensor)) == ask(tensor), name


def test_requires_grad_is_true():
    given = placeholder()
    assert not given.requires_grad
    assert given.requires_grad_() is given
    assert given.requires_grad
    assert given.is_leaf
    with pytest.raises(RuntimeError, match="floating point"):
        placeholder(torch.arange(3)).requires_grad_()


def test_is_placeholder_tells_placeholders_and_their_views_from_all_else():
    given = placeholder()
    assert remat.is_placeholder(given)
    assert remat.is_placeholder(given.t()[0])
    for other in (torch.zeros(3), torch.zeros_like(given), nn.Parameter(torch.zeros(1)), None, 3, [given]):
        assert remat.is_placeholder(other) is False


# Text


def test_text_says_what_it_is():
    for text in (repr(placeholder()), str(placeholder()), f"{placeholder()}", f"{placeholder()!r}"):
        for part in ("block.3", "attention", "out", "(2, 3)", "torch.float32", "cpu"):
            assert part in text
        assert "requires_grad" not in text
    assert "requires_grad=True" in repr(placeholder().requires_grad_())
    for like in LIKES.values():
        given = placeholder(like())
        printed = f"{given} {given.t() if given.dim() < 3 else given[0]} {[given]} { {'a': given} }"
        assert printed.count("attention") == 4


# Errors


def test_error_has_fields_and_is_a_remat_error():
    error = refused(lambda: placeholder().sin())
    assert isinstance(error, remat.RematError)
    assert (error.region, error.op, error.tensor) == SOURCE[:3]
    assert error.consumer.startswith("aten.sin")
    assert refused(lambda: placeholder().data_ptr()).consumer == "data_ptr"


def test_message_tells_what_happened_and_the_three_remedies():
    error = refused(lambda: placeholder().sin())
    lines = str(error).replace(error.line, "model.py:12").splitlines()
    assert_expected_inline(
        "\n".join(textwrap.fill(line, 100) for line in lines),
        """\
block.3::attention.out: aten.sin.default at model.py:12 needs the data of this output, but op
'attention' is saved, so replay skipped it and passes a placeholder without data.
Either (1) call the op as remat.op(Fn.apply, 'name')(...), which keeps what recomputed code reads,
or let remat.op call a function that contains the consumer, too; or (2) wrap the consumer in
remat.native_save_region, so that it is saved too; or (3) move it into a custom autograd Function
with remat.auto_forward (or a RematHandle); or (4) change the policy of 'attention' to RECOMPUTE.""",
    )


def test_error_names_the_line_that_consumed_it():
    given = placeholder()
    linear = nn.Sequential(nn.Linear(3, 2))
    for consume in (
        lambda: given.sin(),
        lambda: given + 1,
        lambda: F.layer_norm(given, (3,)),
        lambda: linear(given),
        lambda: given.tolist(),
        lambda: bool(given[0, 0]),
        lambda: torch.func.vmap(torch.sin)(given),
        lambda: given.t().contiguous(),
    ):
        assert refused(consume).line == f"test_placeholder.py:{consume.__code__.co_firstlineno}"


def test_error_names_the_placeholder_whose_data_is_asked_for():
    one, other = (make_placeholder(torch.zeros(2), Source("r", name, "0")) for name in ("one", "other"))
    assert refused(lambda: torch.ones(2) + other).op == "other"
    assert refused(lambda: one + other).op in ("one", "other")
    assert refused(lambda: torch.ones(2).view_as(one) + other).op == "other"
    assert refused(lambda: other.view_as(one).sin()).op == "other"


# Lifetimes


def test_placeholder_and_views_are_freed_by_reference_counts():
    def use():
        given = placeholder().requires_grad_()
        view = given.t()[1:]
        torch.zeros_like(given)
        repr(given)
        return [weakref.ref(tensor) for tensor in (given, view)]

    with collector_off():
        assert [reference() for reference in use()] == [None] * 2


def test_error_that_was_handled_keeps_nothing():
    def use():
        given = placeholder()
        for consume in (torch.sin, lambda x: x.data_ptr(), lambda x: x.tolist(), lambda x: x.t().numpy()):
            with contextlib.suppress(remat.PlaceholderError):
                consume(given)
        return weakref.ref(given)

    with collector_off():
        assert use()() is None
    error = refused(torch.sin, placeholder())
    assert {type(value) for value in vars(error).values()} <= {str, type(None)}


# Views


def assert_passed_on(expected: Any, actual: Any) -> None:
    """Assert that a call gave placeholders, with the metadata of the true views."""
    wanted, found = tensors_in(expected), tensors_in(actual)
    assert len(found) == len(wanted)
    assert type(actual) is type(expected) or remat.is_placeholder(actual)
    for view, placeholder in zip(wanted, found, strict=True):
        assert remat.is_placeholder(placeholder)
        for name, ask in QUESTIONS.items():
            assert name == "autograd" or ask(placeholder) == ask(view), name
        assert placeholder.requires_grad == view.requires_grad
        assert type(placeholder.grad_fn).__name__ == type(view.grad_fn).__name__
        with pytest.raises(remat.PlaceholderError) as caught:
            placeholder.clone()
        assert (caught.value.region, caught.value.op, caught.value.tensor) == SOURCE[:3]


# As users write them; `test_placeholder_sweep.py` has every op of torch that makes views.
VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "slices": lambda x: x[..., 1:, ::2],
    "broadcast with a real one": lambda x: torch.broadcast_tensors(x, torch.zeros(5, 1, 1, 1))[0],
    "bits": lambda x: x.detach().view(torch.int32),
    "pairs": lambda x: torch.view_as_complex(x.view(2, 3, 2, 2)),
    "data": lambda x: x.data,
    "contiguous": lambda x: x.contiguous(),
    "to what it is": lambda x: x.to(torch.float32),
    "positive": lambda x: +x,
    "iteration": lambda x: list(x),
    "identity": lambda x: nn.Identity()(x),
}


def pair(requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    """Return a tensor with strides of its own and its placeholder."""
    like = torch.randn(2, 3, 4).transpose(0, 1).contiguous().transpose(0, 1).contiguous()
    return like.requires_grad_(requires_grad), make_placeholder(like.detach(), SOURCE).requires_grad_(requires_grad)


@pairwise(
    view=VIEWS,
    mode=[torch.no_grad, torch.enable_grad, torch.inference_mode],
    requires_grad=[False, True],
    possible=lambda mode, requires_grad, **_: not (mode is torch.inference_mode and requires_grad),
)
def test_view_has_the_metadata_of_the_true_view(view, mode, requires_grad):
    like, placeholder = pair(requires_grad)
    with mode():
        assert_passed_on(VIEWS[view](like), VIEWS[view](placeholder))


def test_wrong_view_raises_as_the_true_one_does():
    like, placeholder = pair()
    for view in (lambda x: x.view(5), lambda x: x[7], lambda x: x.squeeze(9), lambda x: x.expand(3, 3, 4)):
        with pytest.raises((RuntimeError, IndexError)) as true:
            view(like)
        with pytest.raises(type(true.value)) as caught:
            view(placeholder)
        assert not isinstance(caught.value, remat.RematError)


@pytest.mark.gpu
def test_placeholder_of_a_device_tensor_is_true_and_refuses():
    like = torch.randn(3, 4, device="cuda").t()
    given = placeholder(like)
    for ask in QUESTIONS.values():
        assert ask(given) == ask(like)
    assert torch.zeros_like(given).device == like.device
    assert given[1:].device == like.device
    for consume in (torch.Tensor.cpu, torch.Tensor.sin, lambda x: x.__cuda_array_interface__, torch.Tensor.data_ptr):
        refused(consume, given)
