"""Out of memory: the report comes, on the host and from the CUDA allocator, and the error goes on as it is."""

from __future__ import annotations

import io
import sys
import weakref

import pytest
import torch

import torch_remat as remat
from tests.helpers import checkpointed, leaf, no_other_regions
from torch_remat.reports import oom

TOO_MUCH = 2**60


@pytest.fixture(autouse=True)
def _no_other_regions():
    with no_other_regions():
        yield


def allocate_too_much():
    torch.empty(TOO_MUCH, dtype=torch.uint8)


def test_other_errors_print_nothing():
    file = io.StringIO()
    with remat.report_on_oom(file):
        pass
    with pytest.raises(ValueError, match="else"), remat.report_on_oom(file):
        raise ValueError("something else")
    with pytest.raises(RuntimeError, match="else"), remat.report_on_oom(file):
        raise RuntimeError("something else")
    assert file.getvalue() == ""
    assert oom._active == []


def wraps(form):
    """Fail to allocate, and raise that error or another because of it."""
    try:
        allocate_too_much()
    except RuntimeError as error:
        if form == "itself":
            raise
        if form == "group":
            raise ExceptionGroup("several", [ValueError("other"), error]) from None  # noqa: F821
        if form == "cause":
            raise ValueError("wrapped") from error
        if form == "hidden":
            raise ValueError("wrapped") from None
        raise ValueError("wrapped")  # noqa: B904


@pytest.mark.parametrize("form", ["itself", "cause", "context", "hidden", "group"])
def test_failed_allocation_prints_the_report_also_behind_another_error(form, capsys):
    if form == "group" and sys.version_info < (3, 11):
        pytest.skip("a form of Python 3.11")
    y = checkpointed(torch.sin, region_name="layers.0", preserve_rng_state=False)(leaf(4) * 2)
    with pytest.raises(Exception, match=r"wrapped|several|DefaultCPUAllocator") as caught, remat.report_on_oom():
        wraps(form)
    text = capsys.readouterr().err
    first, second, *_ = text.splitlines()
    assert first.startswith("torch_remat: out of memory: ")
    assert "DefaultCPUAllocator" in first
    of_plain_code = 24 if form == "itself" else 0  # below `y`, which this frame holds: a leaf and a factor
    assert second == f"kept for backward: {16 + of_plain_code} B"
    assert "layers.0: 16 B\n    args[0]  16 B  float32[4] cpu  input\n" in text
    assert form != "itself" or (caught.value.__cause__, caught.value.__context__) == (None, None)
    del y


def test_failed_allocation_from_before_the_block_prints_nothing():
    file = io.StringIO()

    def fail_twice():
        try:
            raise MemoryError
        except MemoryError:
            with remat.report_on_oom(file):
                raise ValueError("the second try")  # noqa: B904

    with pytest.raises(ValueError, match="second try") as caught:
        fail_twice()
    assert type(caught.value.__context__) is MemoryError
    assert file.getvalue() == ""


def test_allocator_that_tells_first_is_not_told_again():
    file = io.StringIO()

    def function(x):  # as the CUDA allocator does before it raises
        oom.on_device_out_of_memory(0, 1, 3, 2)  # its error was handled inside, and silences no later one
        oom.on_device_out_of_memory(0, 2**30, 8 * 2**30, 2**20)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError), remat.report_on_oom(file):
        checkpointed(function, region_name="layers.7", preserve_rng_state=False)(leaf(2) * 2)
    text = file.getvalue()
    assert (
        "torch_remat: out of memory in the forward of layers.7: 1.0 GiB were asked for on cuda:0, "
        "which has 1.0 MiB free of 8.0 GiB\nkept for backward: 8 B\n"
    ) in text
    assert text.count("out of memory") == text.count("were asked for") == 2


def test_report_that_fails_does_not_hide_the_error(monkeypatch):
    def broken():
        raise ZeroDivisionError("in the report")

    monkeypatch.setattr(oom, "memory_report", broken)
    file = io.StringIO()
    with pytest.raises(MemoryError), remat.report_on_oom(file):
        raise MemoryError
    assert "no memory report: ZeroDivisionError: in the report" in file.getvalue()
    file.close()
    with pytest.raises(MemoryError), remat.report_on_oom(file):  # a stream that cannot be written to
        raise MemoryError


@pytest.mark.gpu
def test_cuda_allocator_tells_before_it_raises():
    file = io.StringIO()
    x = torch.randn(1000, device="cuda", requires_grad=True)

    def function(x):
        try:
            torch.empty(TOO_MUCH, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            return x.sin()

    with remat.report_on_oom(file):
        checkpointed(function, region_name="layers.3")(x * 2).sum().backward()
    assert "in the forward of layers.3: 1048576.0 TiB were asked for on cuda:0" in file.getvalue()
    assert "in the replay of layers.3" in file.getvalue()


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_errors_of_devices_and_of_the_host_are_known_and_blocks_nest(kind):
    file, outer, error = io.StringIO(), io.StringIO(), kind("out of memory. Tried to")

    def fail(x):
        raise error

    with pytest.raises(kind) as caught, remat.report_on_oom(outer), remat.report_on_oom(file):
        checkpointed(fail, region_name="failing", preserve_rng_state=False)(leaf(3) * 2)
    assert file.getvalue() == outer.getvalue()
    assert caught.value is error
    assert "failing: 12 B" in file.getvalue()  # its frames are alive in the traceback, and so is what it kept


class Layers(torch.nn.Module):
    """Runs out of memory in its last layer."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        allocate_too_much()
        return x


def test_plain_code_is_told_what_it_keeps_and_which_line_to_add(capsys):
    model = Layers()
    with pytest.raises(RuntimeError), remat.report_on_oom():
        model(torch.randn(4, 8))
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "kept for backward: 512 B"  # four activations: the input and what each tanh returned
    assert lines[2] == "not counted: parameters, 864 B in 6 tensors"
    assert "TanhBackward0" in "".join(lines)
    assert lines[-1].endswith("remat.checkpoint_modules(model, 'blocks.*')")
    remat.checkpoint_modules(model, "blocks.*")
    with pytest.raises(RuntimeError), remat.report_on_oom():
        model(torch.randn(4, 8))
    text = capsys.readouterr().err
    assert "in 3 regions" in text
    assert "checkpoint_modules" not in text
    assert text.splitlines()[-1].startswith("To keep less: smaller regions")


def test_line_to_add_names_each_list_of_layers_and_no_list_inside_of_one(capsys):
    model = Layers()
    model.down, model.up = (torch.nn.ModuleList([Layers()]) for _ in range(2))
    del model.blocks
    model.blocks = model.down[0].blocks
    with pytest.raises(RuntimeError), remat.report_on_oom():
        model(torch.randn(4, 8))
    assert capsys.readouterr().err.rstrip().endswith("remat.checkpoint_modules(model, ['down.*', 'up.*'])")


def test_code_that_keeps_nothing_is_told_how_to_see_more(capsys):
    with pytest.raises(RuntimeError), remat.report_on_oom():
        allocate_too_much()
    assert "0 B (no region is alive" in (text := capsys.readouterr().err)
    assert text.splitlines()[-1].startswith("What plain code keeps")


def test_a_frame_that_goes_on_keeps_no_variable_alive():
    x = leaf(4).exp()
    try:
        with remat.report_on_oom(io.StringIO()):
            allocate_too_much()
    except RuntimeError:
        pass
    reference = weakref.ref(x)
    del x
    assert reference() is None
