"""Mutants: the runtime broken on purpose, in one place at a time, to see which test notices.

    python -m tests.mutants [--only NAME ...] [--tests PATH ...] [--jobs 2] [--fail-fast] [--learn] [--json OUT]

A mutant is a text patch of one file of the package that breaks one promise. Each runs in a copy of the repository.
First comes the test that noticed it before, as ``mutants.json`` has it; only if that passes, or is gone, all tests run.
A failed test, a crash, and a run beyond the time limit are "noticed". In the end each test that noticed a mutant runs
without it, where it must pass.

The exit code is 1 if no test notices a mutant, or a patch no longer applies.

The promises are those of the contract; `PROMISES` has them with what they say, and each has several mutants.
"""

# ruff: noqa: T201  # a command prints

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
HINTS = Path(__file__).with_name("mutants.json")
PACKAGE = "torch_remat"
NOTED, OUTPUT = "mutant.failed", "mutant.output"  # in the copy: the first test that failed, and what pytest prints
WRONG_PACKAGE = 9  # an exit code
# They look at the source, not at what it does: of the patch itself they would say that it does not apply.
SOURCE_TESTS = ("test_mutants.py", "test_prose.py", "test_rules.py", "test_release.py")
IGNORED = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "site", "htmlcov", "shared")

PROMISES = {
    "gradients": "gradients equal those of the same code without checkpointing, bit for bit",
    "random": "random numbers are right, also where a skipped op drew some, and generators stay as they are",
    "bytes": "what is retained after forward is the inputs, the residents and the kept results, and no more",
    "lifetimes": "no tensor outlives its last use, and there are no reference cycles",
    "writes": "an in-place modification of what backward needs is noticed",
    "mismatch": "a replay that does something else than forward is noticed",
    "outside": "buffers change once, and replay reads no outside tensor that is not as forward left it",
    "calls": "a call is skipped whole or runs whole, and what reaches the region otherwise is refused",
    "placeholders": "a placeholder never stands in for a value",
    "policies": "a policy's verdict holds: what it saves is kept and not recomputed, what it recomputes is not kept",
    "nesting": "regions nest, in each other and in saved-tensor hooks, and in threads",
    "errors": "an exception leaves no state behind, and an error that was raised stands",
    "offload": "an offloaded tensor comes back as it was, leaves the device, and is given back once",
    "budgets": "a budget is kept, and its figures are what is there",
    "reports": "a report counts each storage once, and all of them",
    "dtr": "the bench evicts what its heuristic chooses, and counts what is alive",
}


class Mutant(NamedTuple):
    """One patch.

    Attributes:
        name: Its name.
        promise: Which of `PROMISES` it breaks.
        file: The file, from the package on.
        old: What stands there, exactly once.
        new: What is to stand there.
    """

    name: str
    promise: str
    file: str
    old: str
    new: str

    def patched(self, package: Path = ROOT / PACKAGE) -> str:
        """Return the patched text of the file.

        Raises:
            ValueError: The old text does not occur exactly once.
        """
        text = (package / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: the text to patch occurs {count} times in {self.file}, not once")
        return text.replace(self.old, self.new)


class Outcome(NamedTuple):
    """What became of a mutant.

    Attributes:
        mutant: The mutant.
        by: The test that noticed it, or "time limit" or "crash"; empty if nothing did.
        seconds: How long that took.
        problem: Why nothing can be said; empty if all went well.
    """

    mutant: Mutant
    by: str
    seconds: float = 0.0
    problem: str = ""


MUTANTS = (
    # What a replay sees.
    Mutant(
        "ambient not restored", "gradients", "dispatch/region/replay.py",
        "contexts: list[AbstractContextManager[Any]] = region.ambient.contexts()",
        "contexts: list[AbstractContextManager[Any]] = []",
    ),
    Mutant(
        "autocast left on in replay", "gradients", "dispatch/ambient.py",
        "needed += [torch.autocast(device, enabled=False) for device, *_ in present.autocast]",
        "pass",
    ),
    Mutant(
        "context of replay not entered", "gradients", "dispatch/region/replay.py",
        "            contexts.append(region.replay_context)",
        "            pass",
    ),
    Mutant(
        "attributes of an input lost", "gradients", "dispatch/region/inputs.py",
        "alias.__dict__.update(one.attributes)",
        "pass",
    ),
    Mutant(
        "strides of an input lost under hooks", "gradients", "dispatch/region/inputs.py",
        "kept = _laid_as(kept, *one.layout)",
        "pass",
    ),
    Mutant(
        "argument given twice is two tensors", "gradients", "dispatch/region/inputs.py",
        "leaves[one.same] if one.same is not None",
        "leaves[one.same].detach().clone() if one.same is not None",
    ),
    Mutant(
        "replay does not stop early", "gradients", "dispatch/region/replay.py",
        "        if not (is_last and self._tail_is_tiny(position)):\n",
        "        if False:\n",
    ),
    Mutant(
        "mark of outputs without a gradient lost", "gradients", "dispatch/call/answerer.py",
        "        if call.plain:\n",
        "        if False:\n",
    ),
    # Random numbers.
    Mutant(
        "random state not replayed", "random", "dispatch/region/replay.py",
        "contexts.append(region.rng.replayed())",
        "pass",
    ),
    Mutant(
        "random state not put back after replay", "random", "dispatch/ambient.py",
        "        finally:\n            present.restore()",
        "        finally:\n            pass",
    ),
    Mutant(
        "generators of the region not known", "random", "dispatch/ambient.py",
        "for generator in (*_default_generators(), *extra)}",
        "for generator in _default_generators()}",
    ),
    Mutant(
        "draws of a skipped call not skipped", "random", "dispatch/call/answerer.py",
        "        self.leave(call)\n        if call.kind == ONE:",
        "        if call.kind == ONE:",
    ),
    Mutant(
        "draws of a skipped handle not skipped", "random", "dispatch/call/answerer.py",
        "        if call.drawn is not None or call.touched:\n            ops.leave(call)\n        made = ",
        "        made = ",
    ),
    Mutant(
        "draws of a native region not skipped", "random", "dispatch/call/answerer.py",
        "            self.suppressed.restore()\n        self.leave(call)\n",
        "            self.suppressed.restore()\n",
    ),
    Mutant(
        "draws of a skipped op not skipped", "random", "dispatch/ops/answer.py",
        "entry.before.restore(among=self._region.rng)",
        "pass",
    ),
    Mutant(
        "random state not put back to start over", "random", "dispatch/region/replay.py",
        "            self.region.rng.restore()",
        "            pass",
    ),
    # What is retained after forward.
    Mutant(
        "random state kept though nothing drew", "bytes", "dispatch/ambient.py",
        " if not _equal(start, one.get_state())]",
        "]",
    ),
    Mutant(
        "random state kept though replay draws nothing", "bytes", "dispatch/ops/record.py",
        "        region.rng = None",
        "        pass",
    ),
    Mutant(
        "saved result kept though nothing needs it", "bytes", "dispatch/ops/needs.py",
        "            if runs := storage in needed:\n                needed.remove(storage)",
        "            if runs := storage in needed or bool(entry.saved):\n                needed.discard(storage)",
    ),
    Mutant(
        "argument of a call kept twice", "bytes", "dispatch/call/recorder.py",
        "if given is not None and self._waits(call, holder, tensor, given):",
        "if False:",
    ),
    Mutant(
        "result of a call that replay passes not kept", "bytes", "dispatch/call/ending.py",
        "                roots += [(key, at + 1) for key in entry.touches() if key not in entry.writes]\n",
        "                pass\n",
    ),
    Mutant(
        "result of a call that replay does not pass kept", "bytes", "dispatch/call/ending.py",
        "if not call.is_handle and call.end <= last}",
        "if not call.is_handle}",
    ),
    Mutant(
        "resident is a copy", "bytes", "dispatch/call/log.py",
        "        holder.value = value = self.mode.alias_of(tensor)\n",
        "        holder.value = value = self.mode.alias_of(tensor).clone()\n",
    ),
    Mutant(
        "cast of a weight taken for a result of a native region", "bytes", "dispatch/call/native.py",
        "self.inside.note_foreign(result)",
        "pass",
    ),
    # Lifetimes.
    Mutant(
        "inputs kept after backward", "lifetimes", "dispatch/region/region.py",
        "            self.release()\n",
        "            pass\n",
    ),
    Mutant(
        "function kept after backward", "lifetimes", "dispatch/region/region.py",
        "self.inputs = self.function = self.hooks = self.rng = self.replay_context = self.ambient = None",
        "self.inputs = self.hooks = self.rng = self.replay_context = self.ambient = None",
    ),
    Mutant(
        "kept results kept after backward", "lifetimes", "dispatch/region/region.py",
        "            self.tape.forget_slots()\n",
        "            pass\n",
    ),
    Mutant(
        "filled values kept with the graph", "lifetimes", "dispatch/region/region.py",
        "            finalize(group, self.tape.forget_values).atexit = False",
        "            pass",
    ),
    Mutant(
        "output owns its region", "lifetimes", "dispatch/region/forward.py",
        "node.register_prehook(partial(_reach, ref(region)))",
        "node.register_prehook(partial(_reach, lambda: region))",
    ),
    # In-place modifications.
    Mutant(
        "write in forward not looked for", "writes", "dispatch/region/forward.py",
        "            if value._version != holder.metadata[0]:",
        "            if False:",
    ),
    Mutant(
        "write to a cast leaf not looked for", "writes", "dispatch/region/forward.py",
        "if leaf._version != version and (holder := entry()) is not None and holder.value is None:",
        "if False:",
    ),
    Mutant(
        "version of a parameter not compared", "writes", "dispatch/holder.py",
        "            if value._version != version:\n",
        "            if False:\n",
    ),
    Mutant(
        "version of a resident not compared", "writes", "dispatch/holder.py",
        "    if kept._version != packed.metadata[0]:\n        raise",
        "    if False:\n        raise",
    ),
    Mutant(
        "version of an input not compared", "writes", "dispatch/region/inputs.py",
        "elif one.version >= 0 and kept._version != one.version:",
        "elif False:",
    ),
    Mutant(
        "version of a parameter argument not compared", "writes", "dispatch/region/inputs.py",
        "                one.kept = leaf\n",
        "                one.kept, one.version = leaf, -1\n",
    ),
    Mutant(
        "version of a kept result not compared", "writes", "dispatch/slot.py",
        "        if self.is_changed:\n            raise",
        "        if False:\n            raise",
    ),
    Mutant(
        "version of a cast leaf of a call not compared", "writes", "dispatch/region/forward.py",
        "    if leaf._version != version:\n",
        "    if False:\n",
    ),
    Mutant(
        "changed result kept", "writes", "dispatch/ops/needs.py",
        "if entry.saved and can_keep(entry, 0):",
        "if entry.saved:",
    ),
    Mutant(
        "changes of a recomputed result left out", "writes", "dispatch/ops/needs.py",
        "unfinished = _unfinished(entries, needs) if has_writes else []",
        "unfinished: list[Entry] = []",
    ),
    Mutant(
        "write in part counts as whole", "writes", "dispatch/ops/storages.py",
        "                if not self._is_whole(part, key, before):\n",
        "                if False:\n",
    ),
    # Replays that do something else.
    Mutant(
        "metadata not compared", "mismatch", "dispatch/check/compare.py",
        "if metadata != [tensor.shape, tensor.dtype, tensor.device]:",
        "if False:",
    ),
    Mutant(
        "op of a saved tensor not compared", "mismatch", "dispatch/check/compare.py",
        "if not loaded and _is_by_another_op(region, holder, owner):",
        "if False:",
    ),
    Mutant(
        "layout of a view not compared", "mismatch", "dispatch/region/replay.py",
        "error = lies_otherwise(self.region, position, tensor, owner, before)",
        "error = None",
    ),
    Mutant(
        "values not compared", "mismatch", "dispatch/check/values.py",
        "if getattr(holder, \"fingerprint\", value) != value:",
        "if False:",
    ),
    Mutant(
        "more saved tensors not noticed", "mismatch", "dispatch/region/replay.py",
        "if not region.options.early_stop and self.position != len(self._saved):",
        "if False:",
    ),
    Mutant(
        "outside tensor that was replaced not noticed", "mismatch", "dispatch/region/forward.py",
        "elif node_number(node) < region.first_number and graph_task() < 0:",
        "elif False:",
    ),
    Mutant(
        "replaced parameter not noticed", "mismatch", "dispatch/check/unread.py",
        "                others[id(other)] = partial(_replaced, region, place, one, other)",
        "                pass",
    ),
    Mutant(
        "changed parameter not noticed", "mismatch", "dispatch/check/unread.py",
        "if one is not None and old != new and id(one) not in others and one.is_leaf:",
        "if False:",
    ),
    Mutant(
        "another op answered under a policy", "mismatch", "dispatch/ops/answer.py",
        "if at >= len(entries) or (entries[at].op is not op and not is_mirrored(entries[at].op, op)):",
        "if at >= len(entries):",
    ),
    Mutant(
        "arguments of a saved op not compared", "mismatch", "dispatch/ops/answer.py",
        "if entry.layout and (found := layout_of(args, kwargs)) and entry.layout != found:",
        "if False:",
    ),
    Mutant(
        "policy of a call not compared", "mismatch", "dispatch/call/answerer.py",
        "(call := calls[place]).name == name and call.policy is policy:",
        "(call := calls[place]).name == name:",
    ),
    Mutant(
        "arguments of a call not compared", "mismatch", "dispatch/call/answerer.py",
        "if not same or (dense_layout(leaves) if flat else layout_of(leaves, {})) != call.layout:",
        "if not same:",
    ),
    Mutant(
        "missing call not noticed", "mismatch", "dispatch/call/answerer.py",
        "        self.check_passed(len(self.region.tape.saved))\n",
        "",
    ),
    Mutant(
        "missing op of a native region not noticed", "mismatch", "dispatch/call/answerer.py",
        "    if (error := ops.missing()) is not None:\n",
        "    if False:\n",
    ),
    # What outlives a region.
    Mutant(
        "buffer not put back after replay", "outside", "dispatch/region/replay.py",
        "            if self._before:\n                put_back(self._before)\n            if self.ops",
        "            if self.ops",
    ),
    Mutant(
        "placeholder left in an attribute", "outside", "dispatch/region/replay.py",
        "            if self._bound:\n                put_back(self._bound)\n",
        "",
    ),
    Mutant(
        "buffer not put back to start over", "outside", "dispatch/region/replay.py",
        "            put_back(self._before)\n            self._before, _ =",
        "            self._before, _ =",
    ),
    Mutant(
        "buffer not copied", "outside", "dispatch/region/outside.py",
        "_copy(tensor) if is_copied else None",
        "None",
    ),
    Mutant(
        "buffer without a counter not compared", "outside", "dispatch/region/outside.py",
        "is_written = bool(moved) or not (copy is None or tensor is None or _same(tensor, copy))",
        "is_written = bool(moved)",
    ),
    Mutant(
        "counter of a buffer not put back", "outside", "dispatch/region/outside.py",
        "            set_version(tensor, version)",
        "            pass",
    ),
    Mutant(
        "change by a skipped call not noted", "outside", "dispatch/region/outside.py",
        "            if is_same and (copy is None or tensor is None or _same(tensor, copy)):",
        "            if True:",
    ),
    Mutant(
        "later change of an outside tensor not noticed", "outside", "dispatch/region/outside.py",
        "if until := inf if has_moved else self.until:",
        "if until := self.until:",
    ),
    Mutant(
        "change of what a call bound not noticed", "outside", "dispatch/region/outside.py",
        "has_moved = copy is None and version_of(tensor) != version",
        "has_moved = False",
    ),
    Mutant(
        "numbers of a module do not go with its tensors", "outside", "dispatch/reach.py",
        "if NoneType in kinds or ((has_buffers or Tensor in kinds) and not kinds.isdisjoint(_NUMBERS)):",
        "if False:",
    ),
    Mutant(
        "buffer not left as a skipped call left it", "outside", "dispatch/call/answerer.py",
        "for tensor in self.region.outside.leave(call.name):",
        "for tensor in ():",
    ),
    Mutant(
        "tensor replaced that a skipped op saves not noticed", "outside", "dispatch/check/unread.py",
        "if not self.moved.isdisjoint(keys_of(tensor)):",
        "if False:",
    ),
    Mutant(
        "unread tensor stays so when it is overwritten", "outside", "dispatch/check/unread.py",
        "                del self._storages[key]",
        "                pass",
    ),
    Mutant(
        "early read of what is written later not noticed", "outside", "dispatch/ops/needs.py",
        "if key in written and key not in own)",
        "if False)",
    ),
    # Calls.
    Mutant(
        "write of a call to its argument or variable not looked for", "calls", "dispatch/call/call.py",
        "            if version_of(tensor) != version:\n",
        "            if False:\n",
    ),
    Mutant(
        "call that must run whole is skipped", "calls", "dispatch/call/ending.py",
        " and not log.has_policy and _is_changed(call):",
        " and False:",
    ),
    Mutant(
        "call that wrote outside runs again", "calls", "dispatch/call/ending.py",
        "    if call.wrote:\n",
        "    if False:\n",
    ),
    Mutant(
        "native region that wrote outside starts over", "calls", "dispatch/call/answerer.py",
        "return entry.touched or not self.region.options.preserve_rng_state",
        "return not self.region.options.preserve_rng_state",
    ),
    Mutant(
        "tensor that leaves a call let through", "calls", "dispatch/call/ending.py",
        "if (call := call_left_by_a_tensor(log.left, readers)) is not None:",
        "if False:",
    ),
    Mutant(
        "list that a call fills let through", "calls", "dispatch/call/call.py",
        "if self._state and is_changed(self._state, ops.region.function):",
        "if False:",
    ),
    Mutant(
        "write of a call not noted", "calls", "dispatch/call/call.py",
        "        if self.written:\n            ops.note_writes(self)",
        "        pass",
    ),
    Mutant(
        "write of a native region not noted", "calls", "dispatch/call/native.py",
        "        if self.written:\n            self.ops.note_writes(self)",
        "        pass",
    ),
    Mutant(
        "odd result of a call let through", "calls", "dispatch/call/result.py",
        "        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):",
        "        if False:",
    ),
    Mutant(
        "write of a saved handle let through", "calls", "dispatch/call/log.py",
        "            if version_of(tensor) == version:\n                continue",
        "            continue",
    ),
    Mutant(
        "gradient through a call in forward let through", "calls", "dispatch/region/region.py",
        "if op and (self.running is None or self.running() != op):",
        "if False:",
    ),
    Mutant(
        "gradient that leaves and comes back let through", "calls", "dispatch/region/region.py",
        "if self.inputs is not None and self.inputs.is_left_by_gradient(self._variables):",
        "if False:",
    ),
    Mutant(
        "handle without its end let through", "calls", "dispatch/call/log.py",
        "            if ctx is not None:\n                raise UsageError(",
        "            if False:\n                raise UsageError(",
    ),
    # Placeholders.
    Mutant(
        "op on a placeholder reads zeros", "placeholders", "dispatch/placeholder.py",
        "        result = op.decompose(*args, **kwargs)\n",
        "        args, kwargs = mapped(_zeros_in_place_of, args, kwargs)\n        return op(*args, **kwargs)\n"
        "        result = op.decompose(*args, **kwargs)\n",
    ),
    Mutant(
        "placeholder for a subclass", "placeholders", "dispatch/call/handle.py",
        "            if isinstance(meta, Tensor):\n",
        "            if False:\n",
    ),
    Mutant(
        "swallowed refusal forgotten", "placeholders", "dispatch/placeholder.py",
        "    last_refusal.set(refusal)\n",
        "",
    ),
    Mutant(
        "last values not compared", "mismatch", "dispatch/region/replay.py",
        "        if region.last_sample is not None or self._suspects:\n",
        "        if self._suspects:\n",
    ),
    Mutant(
        "carriers not compared", "mismatch", "dispatch/region/forward.py",
        "            if carriers:\n",
        "            if False:\n",
    ),
    Mutant(
        "replay with other flags", "gradients", "dispatch/region/replay.py",
        "give_flags(parameters, region.flags)",
        "()",
    ),
    Mutant(
        "refusal that stands forgotten", "placeholders", "dispatch/region/replay.py",
        "        if (refusal := self._refused()) is not None:\n            raise self._explained(refusal.error())",
        "",
    ),
    # Policies.
    Mutant(
        "kept result not kept", "policies", "dispatch/ops/needs.py",
        "                    keep.append((entry, FIRST))\n",
        "",
    ),
    Mutant(
        "verdict to offload is to recompute", "policies", "policies/decision.py",
        'self.keeps = self.offloads or self._name_.endswith("SAVE")',
        'self.keeps = self._name_.endswith("SAVE")',
    ),
    Mutant(
        "verdicts for several results swapped", "policies", "dispatch/ops/record.py",
        "places = [place for place, decision in enumerate(said) if decision.keeps]",
        "places = [place for place, decision in enumerate(said) if not decision.keeps]",
    ),
    Mutant(
        "the weaker of two verdicts holds", "policies", "policies/policy.py",
        "return (max(said[0] for said in found if said),) if any(found) else ()",
        "return (min(said[0] for said in found if said),) if any(found) else ()",
    ),
    Mutant(
        "result left out by name is kept", "policies", "dispatch/ops/record.py",
        "        entry.saved -= {place}\n",
        "",
    ),
    Mutant(
        "pattern that matches nothing let through", "policies", "dispatch/ops/record.py",
        "        if error is not None:\n            raise PolicyError(error.what",
        "        if False:\n            raise PolicyError(error.what",
    ),
    Mutant(
        "what is written outside by an op is made again", "policies", "dispatch/ops/record.py",
        "        if entry.outside and entry.made:\n",
        "        if False:\n",
    ),
    # Regions in regions, hooks and threads.
    Mutant(
        "names of a region's scope lost in replay", "nesting", "dispatch/region/replay.py",
        "            contexts.append(scope_restored(region.scope))\n",
        "            pass\n",
    ),
    Mutant(
        "mode of the enclosing region lost", "nesting", "dispatch/mode.py",
        "            _current.set(parent)\n",
        "            _current.set(None)\n",
    ),
    Mutant(
        "ops stay with a native region that is over", "nesting", "dispatch/call/answerer.py",
        "            self.native, self.ops = None, outer",
        "            self.native = None",
    ),
    Mutant(
        "ops not shown after a hook", "nesting", "dispatch/mode.py",
        "            yield\n        finally:\n            self.show_ops_to(previous)",
        "            yield\n        finally:\n            pass",
    ),
    Mutant(
        "two threads replay one region", "nesting", "dispatch/region/region.py",
        "        self.lock = RLock()",
        '        self.lock = __import__("contextlib").nullcontext()',
    ),
    # Exceptions.
    Mutant(
        "values of a failed replay kept", "errors", "dispatch/region/replay.py",
        "        except BaseException:\n            region.tape.forget_values()\n",
        "        except BaseException:\n",
    ),
    Mutant(
        "swallowed misuse forgotten", "errors", "dispatch/region/forward.py",
        "        if region.misuse is not None:\n",
        "        if False:\n",
    ),
    Mutant(
        "call that raised is skipped", "errors", "dispatch/call/log.py",
        "        self.call.is_saved, self.call.always = False, True\n",
        "        pass\n",
    ),
    Mutant(
        "log of forward not let go", "lifetimes", "dispatch/region/forward.py",
        "            self.ops.forget()\n            self.ops = None\n",
        "            pass\n",
    ),
    # Offloading.
    Mutant(
        "version of an offloaded tensor not compared", "offload", "offload/transfer.py",
        "if self._counter._version != self._version or (value is not None and value._version != self._version):",
        "if False:",
    ),
    Mutant(
        "version of what comes back not set", "offload", "offload/transfer.py",
        "            set_version(flat, self._version)\n",
        "            pass\n",
    ),
    Mutant(
        "ticket not released", "offload", "offload/transfer.py",
        "        finalize(self, offloader.release, ticket).atexit = False\n",
        "",
    ),
    Mutant(
        "memory of an offloaded tensor stays", "offload", "offload/transfer.py",
        "        self._counter.data = _NOTHING\n",
        "",
    ),
    Mutant(
        "value kept though the graph is", "offload", "offload/transfer.py",
        "self.value = None if graph_is_kept() else value",
        "self.value = value",
    ),
    Mutant(
        "tensor sent twice", "offload", "offload/sender.py",
        "            if known.is_unchanged(placement):\n",
        "            if False:\n",
    ),
    Mutant(
        "copy to the host not awaited", "offload", "offload/cpu.py",
        "            elif not self.event.query():\n                return False\n",
        "",
    ),
    Mutant(
        "bytes on the host not taken off", "offload", "offload/shared.py",
        "`Offloader.release`.\"\"\"\n        self._away.pop(ticket, None)\n",
        "`Offloader.release`.\"\"\"\n",
    ),
    Mutant(
        "prefetch without a bound", "offload", "offload/prefetch.py",
        "if waiting and waiting + copy.bytes > limit:",
        "if False:",
    ),
    Mutant(
        "file not removed", "offload", "offload/disk.py",
        "        ticket.folder.remove_file(ticket.path)\n",
        "",
    ),
    # Budgets.
    Mutant(
        "budget not kept at the end of forward", "budgets", "budgets/budget.py",
        "            step.rows.append(kept.row)\n            if self.ledger.total > self.limit:\n",
        "            step.rows.append(kept.row)\n            if False:\n",
    ),
    Mutant(
        "what an author decides runs as plain code", "budgets", "ladders/ladder.py",
        "[] if record.is_named or left_out else",
        "[] if left_out else",
    ),
    Mutant(
        "write after eviction not noticed", "budgets", "dispatch/call/lowering.py",
        "        mark_changed(holder)\n    holder.value = None\n",
        "        pass\n    holder.value = None\n",
    ),
    Mutant(
        "lowered past a result that is gone", "budgets", "dispatch/call/lowering.py",
        "        if not _may_go_further(region):\n",
        "        if False:\n",
    ),
    Mutant(
        "lowered region keeps its tensors", "budgets", "dispatch/call/lowering.py",
        "if holder is not None and value is not None and key_of(value) not in kept:",
        "if False:",
    ),
    Mutant(
        "lowered region keeps results of calls", "budgets", "dispatch/call/lowering.py",
        "    call.kept = {place: slot for place, slot in call.kept.items() if place in places}\n",
        "",
    ),
    Mutant(
        "lowered region keeps what replay makes for kept calls", "budgets", "dispatch/call/lowering.py",
        "        _let_wait(calls.values())\n",
        "",
    ),
    Mutant(
        "what a lowered region could make is not noted", "budgets", "dispatch/call/recorder.py",
        "            call.may_wait = [*call.may_wait, (maker[0], waiting)]\n",
        "",
    ),
    Mutant(
        "runtime's own calls are the region's", "calls", "dispatch/mode.py",
        "        if seen is None or innermost_function_mode() is not seen:\n",
        "        if True:\n",
    ),
    Mutant(
        "access by the runtime counts", "calls", "dispatch/call/functions.py",
        "        if module.startswith(_OURS):  # such as in a handle\n",
        "        if False:\n",
    ),
    Mutant(
        "casts in another order", "gradients", "dispatch/call/functions.py",
        "reversed(places) if casts_the_last_first() else places",
        "places",
    ),
    Mutant(
        "replay goes on past a call whose argument waits", "bytes", "dispatch/region/region.py",
        "for edge in (call.start, call.end)}",
        "for edge in (call.start,)}",
    ),
    Mutant(
        "bytes left over buy nothing", "budgets", "budgets/price.py",
        "        total = _spend_rest(parts, rungs, total, limit, most)\n",
        "        pass\n",
    ),
    Mutant(
        "replays not counted in a budget", "budgets", "budgets/price.py",
        " and _fits(parts, rungs, place, high, most)",
        "",
    ),
    Mutant(
        "plain regions not counted", "budgets", "budgets/counted.py",
        "        ledger.total += size\n",
        "        self._size = 0\n",
    ),
    Mutant(
        "share that is not measured keeps all", "budgets", "budgets/budget.py",
        "elif self.limit >= UNLIMITED and self.share in (None, 1):",
        "elif self.limit >= UNLIMITED:",
    ),
    Mutant(
        "buffers counted by a budget", "budgets", "budgets/counted.py",
        "[key for key in parts if key not in self._buffers]",
        "list(parts)",
    ),
    Mutant(
        "storage counted each time", "budgets", "_util/storages.py",
        "            self.total += size - self.sizes[key]\n",
        "            self.total += size\n",
    ),
    # Reports.
    Mutant(
        "shared storage reported twice", "reports", "reports/data.py",
        "        if memory.key in self._owners:\n            return 0\n",
        "",
    ),
    Mutant(
        "written results not reported", "reports", "_kept.py",
        "        for place, slot in list(entry.kept.items()):\n",
        "        for place, slot in [one for one in entry.kept.items() if one[0] >= 0]:\n",
    ),
    Mutant(
        "regions that keep other things told as one", "reports", "reports/fold.py",
        "    return region.idle_policy, _facts(region.tensors), ops",
        "    return region.idle_policy, None, ops",
    ),
    Mutant(
        "what a partial holds not reported", "reports", "_kept.py",
        "    while isinstance(function, partial):\n",
        "    while False:\n",
    ),
    Mutant(
        "a policy that selects nothing says nothing", "reports", "policies/nothing.py",
        "    if not selects:\n",
        "    if False:\n",
    ),
    Mutant(
        "random state not reported", "reports", "_kept.py",
        '    yield from _of_state(region.rng, "")\n',
        "",
    ),
    # The bench for dynamic rematerialization.
    Mutant(
        "the newest of equal scores not evicted", "dtr", "dtr/_pool.py",
        "if score < least or (score == least and score != 0) or chosen is None:",
        "if score < least or chosen is None:",
    ),
    Mutant(
        "expired match not played again", "dtr", "dtr/_pool.py",
        "        if self._until[1] < clock:\n",
        "        if False:\n",
    ),
    Mutant(
        "access not noted", "dtr", "dtr/_memory.py",
        "            storage.last_access = self.clock\n            if tensor.resident:",
        "            if tensor.resident:",
    ),
    Mutant(
        "spare room not given back", "dtr", "dtr/_memory.py",
        "                self.grow(-spare)\n",
        "                pass\n",
    ),
)  # fmt: skip


# What runs inside of pytest, as a plugin.


def pytest_sessionstart(session: Any) -> None:
    """See that the package of the copy is what is imported."""
    import pytest

    import torch_remat

    if Path(torch_remat.__file__).resolve().parent != ROOT / PACKAGE:
        pytest.exit(f"the tests import {torch_remat.__file__}, not the copy in {ROOT}", returncode=WRONG_PACKAGE)


def pytest_runtest_logreport(report: Any) -> None:
    """Note the first test that fails."""
    if report.failed and not (ROOT / NOTED).exists():
        (ROOT / NOTED).write_text(report.nodeid, encoding="utf-8")


# What runs pytest.


@contextmanager
def copied(mutant: Mutant | None) -> Iterator[Path]:
    """Copy the repository into a temporary folder, and patch the copy."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder).resolve() / "copy"
        shutil.copytree(ROOT, copy, ignore=IGNORED)
        if mutant is not None:
            (copy / PACKAGE / mutant.file).write_text(mutant.patched(), encoding="utf-8")
        yield copy


def run_tests(copy: Path, tests: Sequence[str], limit: float, options: Sequence[str]) -> str:
    """Run tests in a copy until the first fails; return what noticed something, empty if nothing did.

    Raises:
        LookupError: There are no such tests.
        RuntimeError: The tests did not run with the package of the copy.
    """
    (copy / NOTED).unlink(missing_ok=True)
    arguments = ["-x", "-q", "-p", "tests.mutants", "-p", "no:cacheprovider", "--rootdir", str(copy)]
    arguments += ["-c", str(copy / "pyproject.toml"), *[f"--ignore-glob=*/{name}" for name in SOURCE_TESTS]]
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["torch", "optree", "pytest"])  # once for all runs: half of what a short one takes
    process = forks.Process(target=_run_pytest, args=(copy, [*arguments, *options, *tests]))
    process.start()
    try:
        process.join(limit)
    finally:
        if is_late := process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)  # its workers too
            process.join()
    if is_late:
        return "time limit"
    output = (copy / OUTPUT).read_text(encoding="utf-8", errors="replace")[-500:]
    if (copy / NOTED).exists():
        return (copy / NOTED).read_text(encoding="utf-8")
    if process.exitcode in (4, 5):  # pytest's codes for paths that it does not find, and for no tests
        raise LookupError(output)
    if process.exitcode and process.exitcode > 0:  # no test failed, and yet there was an error
        raise RuntimeError(output)
    return "" if process.exitcode == 0 else "crash"


def _run_pytest(copy: Path, arguments: Sequence[str]) -> None:
    """Run pytest on a copy, in a process and a group of its own."""
    os.setsid()
    output = os.open(copy / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [str(copy), *[path for path in sys.path if Path(path).resolve() != ROOT]]
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tests", PACKAGE):
            del sys.modules[name]
    import pytest

    sys.exit(pytest.main(arguments))


def found(copy: Path, hint: str) -> Iterator[str]:
    """Yield where a test may be now, given the name of its file and its own, which outlives a renamed file."""
    name, _, test = hint.partition("::")
    files = sorted((copy / "tests").rglob("test_*.py"))
    here = [file for file in files if file.name == name]
    words = f"def {test.rpartition('::')[2]}("
    for file in [*here, *files]:
        if test and words in file.read_text(encoding="utf-8"):
            yield f"{file.relative_to(copy)}::{test}"
            break
    yield from [str(file.relative_to(copy)) for file in here]


def hint_of(test: str) -> str:
    """Return a test without its folder, and without its parameters, which change most often."""
    return Path(test.partition("::")[0]).name + "".join(test.partition("::")[1:]).partition("[")[0]


def look(mutant: Mutant, hint: str, limit: float) -> Outcome:
    """Run the test that noticed a mutant before; if it is gone or passes, its whole file."""
    begin = time.monotonic()
    with copied(mutant) as copy:
        by = ""
        for place in found(copy, hint):
            with suppress(LookupError):
                if by := run_tests(copy, [place], limit, ()):
                    break
    return Outcome(mutant, by, time.monotonic() - begin)


def look_everywhere(mutant: Mutant, tests: Sequence[str], limit: float, jobs: int) -> Outcome:
    """Run all tests."""
    begin = time.monotonic()
    with copied(mutant) as copy:
        inside = [str(copy / Path(test).resolve().relative_to(ROOT)) if is_inside(test) else test for test in tests]
        by = run_tests(copy, inside, limit, ("-n", str(jobs), "--dist", "loadfile") if jobs else ())
    return Outcome(mutant, by, time.monotonic() - begin)


def is_inside(test: str) -> bool:
    """Whether a path, or a test's name that begins with one, lies in the repository."""
    return Path(test).resolve().is_relative_to(ROOT)


def guarded(look: Callable[..., Outcome], mutant: Mutant, *about: Any) -> Outcome:
    """Return the outcome, also where nothing can be said."""
    try:
        return look(mutant, *about)
    except (ValueError, LookupError, RuntimeError) as error:
        return Outcome(mutant, "", problem=str(error))


def confirmed(outcomes: Sequence[Outcome], limit: float) -> list[Outcome]:
    """Return the outcomes; those of tests that fail without a mutant, too, say nothing."""
    tests = sorted({outcome.by for outcome in outcomes if outcome.by.startswith("tests")})
    wrong: set[str] = set()
    with copied(None) as copy:
        while left := [test for test in tests if test not in wrong]:
            by = run_tests(copy, left, limit, ())
            if by not in left:
                break
            wrong.add(by)
    why = "{} fails without the mutant, too"
    return [one._replace(by="", problem=why.format(one.by)) if one.by in wrong else one for one in outcomes]


def told(outcome: Outcome) -> str:
    """Return the line about one mutant."""
    said = f"PROBLEM: {outcome.problem}" if outcome.problem else "NOT noticed"
    if outcome.by:
        said = f"noticed by {outcome.by}"
    return f"{outcome.mutant.name:58} {outcome.mutant.promise:12} {outcome.seconds:5.0f} s  {said}"


def run_all(
    mutants: Sequence[Mutant], tests: Sequence[str], jobs: int, fail_fast: bool, limit: float
) -> Iterator[Outcome]:
    """Yield the outcome of each mutant: first of those for which a hint helps, then of the others."""
    hints: dict[str, str] = json.loads(HINTS.read_text(encoding="utf-8")) if HINTS.exists() and not tests else {}
    left = [mutant for mutant in mutants if mutant.name not in hints]
    with ThreadPoolExecutor(jobs) as pool:
        hinted = [mutant for mutant in mutants if mutant.name in hints]
        for outcome in pool.map(lambda mutant: guarded(look, mutant, hints[mutant.name], limit), hinted):
            if outcome.by or outcome.problem:
                yield outcome
            else:
                left.append(outcome.mutant)
    for mutant in left:
        outcome = guarded(look_everywhere, mutant, tests or ["tests"], 10 * limit, jobs)
        yield outcome
        if fail_fast and not outcome.by:
            return


def learn(outcomes: Sequence[Outcome]) -> None:
    """Write down which tests noticed the mutants."""
    hints = json.loads(HINTS.read_text(encoding="utf-8")) if HINTS.exists() else {}
    hints |= {outcome.mutant.name: hint_of(outcome.by) for outcome in outcomes if "::" in outcome.by}
    known = {mutant.name for mutant in MUTANTS}
    kept = {name: hint for name, hint in sorted(hints.items()) if name in known}
    HINTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mutants, and tell which are noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Which test notices which mutant?")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these mutants, or promises")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="only these tests, without hints")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes at a time")
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first mutant that is not noticed")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one file; for all of them ten times")
    parser.add_argument("--learn", action="store_true", help="write to mutants.json which test noticed which mutant")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the outcomes there")
    given = parser.parse_args(arguments)
    chosen = [one for one in MUTANTS if not given.only or one.name in given.only or one.promise in given.only]
    if not chosen:
        parser.error(f"no mutant or promise is named {given.only}")
    begin, outcomes = time.monotonic(), []
    for outcome in run_all(chosen, given.tests, given.jobs, given.fail_fast, given.limit):
        print(told(outcome), flush=True)
        outcomes.append(outcome)
    outcomes = confirmed(outcomes, 10 * given.limit)
    bad = [outcome for outcome in outcomes if not outcome.by]
    if given.learn:
        learn(outcomes)
    if given.json is not None:
        rows = [{"mutant": one.mutant.name, "promise": one.mutant.promise, "by": one.by, "problem": one.problem,
                 "seconds": round(one.seconds, 1)} for one in outcomes]  # fmt: skip
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    seconds = time.monotonic() - begin
    print(f"\n{len(outcomes)} of {len(chosen)} mutants ran in {seconds:.0f} s; {len(bad)} not noticed")
    for outcome in bad:
        print(told(outcome))
    return 1 if bad or len(outcomes) < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
