"""What a policy is: what forward asks of it, how several are combined, and how one is taken apart.

In: what a user chose to keep. Kept: by policy what it says of ops, of functions and of modules. Out: while one forward
runs, a decision for each result of an op, and an error for an entry that matched nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch_remat.errors import Carried, PolicyError
from torch_remat.policies.decision import RECOMPUTED, Decision

if TYPE_CHECKING:
    from torch_remat.ladders.ladder import Ladder, Rung

_NONE: Mapping[Any, Decision] = MappingProxyType({})
_NO_ACTS: Mapping[Any, Any] = MappingProxyType({})


class ChoosesModules(Protocol):
    """What a region asks of a policy that chooses modules."""

    def name_of(self, module: Any) -> str | None:
        """Return the path of a module that it chooses; None for another."""

    def enter(self, function: Callable[..., Any], args: Sequence[Any] = ()) -> None:
        """Find the modules of a region that begins."""


class ChoosesRungs(Protocol):
    """What a region asks of a policy that goes by price."""

    def choose(self, ladder: Ladder) -> Rung:
        """Return what a region keeps, given what it can keep."""


class Named(Protocol):
    """An op of which automatic names are known."""

    def labels(self) -> Sequence[str]:
        """Return the automatic names of all results."""


class OpContext:
    """What a policy function gets as its first argument.

    Attributes:
        op_output: What the op returned.
        is_recompute: False: policies are asked in forward only; before 2.13 ``torch.compile`` asks in both phases.
        names: The automatic names of the op's results.
        state: A dict of the policy function's own, empty at the start of each forward: what it counts there is the
            same in every run of the region.
    """

    __slots__ = ("_op", "is_recompute", "op_output", "state")

    state: dict[str, Any]

    def __init__(self, op_output: Any, op: Named | None) -> None:
        self.op_output = op_output
        self.is_recompute = False
        self._op = op

    @property
    def names(self) -> Sequence[str]:
        """The automatic names of the op's results, such as ``["attention.mm_2_0"]``."""
        if self._op is None:
            raise Carried(
                PolicyError(
                    "code that a policy function calls reads the automatic name of an op, which was not found in time",
                    remedy="Read ctx.name in the policy function itself, or in a function that it calls by a global "
                    "name, closes over or wraps in functools.partial.",
                )
            )
        return self._op.labels()

    @property
    def name(self) -> str:
        """The automatic name of the op's first result, such as ``attention.mm_2_0``."""
        return self.names[0]


class OpPolicy:
    """A policy for the ops of a region; ``|`` combines it with another of any kind, and the stronger decision holds.

    Stronger is: excluding by name, then MUST before PREFER, then saving before offloading before recomputing.

    Attributes:
        is_ready: Whether it knows functions, of which not all has to occur, and ops, by which it decides where these
            are watched anyway: the library's own policies, and ops of other libraries.
        says_nothing: Whether it only says of things that they may be recomputed, as they are without it.
        expects_ops: Whether a region in which it selects nothing is worth a word. A function is the user's own logic,
            and names that match nothing are an error.
    """

    expects_ops = is_ready = says_nothing = False
    taken_apart: Split | None = None  # once `split` has done it

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles have; they are taken apart anew, since pickle does not know all functions."""
        return {name: value for name, value in vars(self).items() if name != "taken_apart"}

    def op_names(self) -> Sequence[str]:
        """Return the names of the ops that it lists."""
        return ()

    def functions(self) -> Mapping[Any, Decision]:
        """Return what it decides about functions, if it does not ask for ops."""
        return _NONE

    def left_out(self) -> Sequence[str]:
        """Return the patterns on names that it excludes, if it does nothing else."""
        return ()

    def modules(self) -> Sequence[ChoosesModules]:
        """Return it, if it chooses modules and does nothing else."""
        return ()

    def price(self) -> ChoosesRungs | None:
        """Return it, if it goes by price and does nothing else."""
        return None

    def kinds(self) -> Iterable[OpPolicy]:
        """Return the policies of which it is made."""
        return (self,)

    def begin(self) -> Decider:
        """Begin one forward."""
        return Decider()

    def parts(self) -> tuple[Any, ...]:
        """Return kinds of policy, each with what it is about and with its decision, or None where it takes none.

        They are constants to the compiler.
        """
        return ()

    def __or__(self, other: Any) -> OpPolicy:
        """Combine with another policy."""
        return Combined((self, _read(other)))

    def __ror__(self, other: Any) -> OpPolicy:
        """Combine with another policy."""
        return Combined((_read(other), self))


class Decider:
    """A policy while one forward runs; this one says nothing.

    Attributes:
        reads_names: Whether it decides by automatic names, so that all ops have to be counted.
        notes_packed: Whether it asks which results autograd saves, so that these have to be noted.
        plans: What the runtime knows of ops, by identity; where the op alone decides, it outlives the forward.
    """

    reads_names = notes_packed = False
    plans: dict[int, Any]

    def __init__(self) -> None:
        self.plans = {}

    def decide(self, context: OpContext, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Decision]:
        """Return the decision for each result of an op, or one decision for all."""
        return RECOMPUTED

    def decide_op(self, op: Any) -> bool | None:
        """Return whether the one result of an op is kept, if the op alone decides and it does not leave the device."""
        return None

    def may_save(self, op: Any) -> bool:
        """Whether ops of the same kind, whatever their overload, are known to be among those that are saved."""
        return False

    def decide_name(self, name: str) -> Decision:
        """Return the decision for a tensor that was named by hand."""
        return Decision.PREFER_RECOMPUTE

    def unmatched(self, names: Iterable[str]) -> PolicyError | None:
        """Return the error about an entry that matched nothing, if there is one; ``names`` are all names."""
        return None


class Combined(OpPolicy):
    """Several policies, of which the strongest decision holds."""

    def __init__(self, policies: Sequence[OpPolicy]) -> None:
        self._policies = policies
        self.says_nothing = all(policy.says_nothing for policy in policies)
        self.expects_ops = all(policy.expects_ops for policy in policies if not policy.says_nothing)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self._policies)).replace("| ~", "& ~")

    def kinds(self) -> Iterable[OpPolicy]:
        """Return the policies of which it is made."""
        return (kind for policy in self._policies for kind in policy.kinds())

    def begin(self) -> Decider:
        """Begin one forward."""
        return _CombinedDecider([policy.begin() for policy in self._policies])

    def op_names(self) -> Sequence[str]:
        """Return the names that any of them lists."""
        return [name for policy in self._policies for name in policy.op_names()]

    def parts(self) -> tuple[Any, ...]:
        """Return the kinds and arguments of all of them."""
        return tuple(part for policy in self._policies for part in policy.parts())


class _CombinedDecider(Decider):
    def __init__(self, deciders: Sequence[Decider]) -> None:
        super().__init__()
        self._deciders = deciders
        self.reads_names = any(decider.reads_names for decider in deciders)
        self.notes_packed = any(decider.notes_packed for decider in deciders)

    def decide(self, context: OpContext, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Decision]:
        found = [decider.decide(context, op, args, kwargs) for decider in self._deciders]
        count = max(map(len, found))
        if count == 1:
            return (max(said[0] for said in found if said),) if any(found) else ()
        return [max(said[place if len(said) > 1 else 0] for said in found if said) for place in range(count)]

    def may_save(self, op: Any) -> bool:
        return any(decider.may_save(op) for decider in self._deciders)

    def decide_name(self, name: str) -> Decision:
        return max(decider.decide_name(name) for decider in self._deciders)

    def unmatched(self, names: Iterable[str]) -> PolicyError | None:
        known = list(names)
        return next((error for decider in self._deciders if (error := decider.unmatched(known)) is not None), None)


class KeptFunctions(NamedTuple):
    """What a policy says of functions.

    Attributes:
        decisions: By what a mode sees of each.
        left_out: Patterns on the names of calls that are not kept.
        policy: The policy, with what it says of ops.
        tables: What each phase of a region does with each function, once a first region was made.
        acts: Of functions that are kept by price, by the number of a call which of its results are kept; of a number
            that is not there replay runs the call.
        names: Of these calls, by function and number, their names.
        away: Those of these calls, by function and number, whose tensors leave the device.
    """

    decisions: Mapping[Any, Decision]
    left_out: Sequence[str]
    policy: OpPolicy
    tables: dict[str, Any]
    acts: Mapping[Any, Mapping[int, Sequence[int]]] = _NO_ACTS
    names: Mapping[tuple[Any, int], str] = _NO_ACTS
    away: Collection[tuple[Any, int]] = ()


NOTHING_BY_FUNCTION = KeptFunctions(_NONE, (), OpPolicy(), {})
_TABLES: dict[Any, dict[str, Any]] = {}  # since many make a policy anew in each step


class Split(NamedTuple):
    """What a policy says of ops, for which these have to be watched; of functions; of modules; and by price."""

    ops: OpPolicy | None
    functions: KeptFunctions | None
    modules: Sequence[ChoosesModules]
    price: ChoosesRungs | None


def split(policy: OpPolicy) -> Split:
    """Take a policy apart.

    Raises:
        PolicyError: It goes by price, and decides about ops.
    """
    if policy.taken_apart is None:
        policy.taken_apart = _split(policy)
    return policy.taken_apart


def _split(policy: OpPolicy) -> Split:
    modules = [one for part in policy.kinds() for one in part.modules()]
    prices = [price for part in policy.kinds() if (price := part.price()) is not None]
    found = [part for part in policy.kinds() if not (part.modules() or part.says_nothing) and part.price() is None]
    by_function = [part for part in found if part.functions()]
    if not prices and len(by_function) < len(found):
        # Where ops are watched anyway, policies that know ops decide about these, by whose names others may know them.
        by_function = [part for part in by_function if not part.is_ready]
    ops = [part for part in found if not any(part is one for one in by_function)]
    decisions: dict[Any, Decision] = {}
    for part in by_function:
        for function, decision in part.functions().items():
            decisions[function] = max(decision, decisions.get(function, decision))
    decisions = {function: decision for function, decision in decisions.items() if decision.keeps}
    left_out = [pattern for part in ops for pattern in part.left_out()]
    if prices:
        _check_prices(policy, prices, ops)
        return Split(None, _kept(decisions, left_out, policy), modules, prices[0])
    kept = _kept(decisions, left_out, policy) if decisions else None
    if by_function and all(part.left_out() for part in ops):
        return Split(None, kept, modules, None)
    return Split(_together(ops), kept, modules, None)


def _together(policies: Sequence[OpPolicy]) -> OpPolicy | None:
    if len(policies) < 2:
        return policies[0] if policies else None
    return Combined(policies)


def _kept(decisions: Mapping[Any, Decision], left_out: Sequence[str], policy: OpPolicy) -> KeptFunctions:
    key = (tuple(decisions.items()), tuple(left_out))
    return KeptFunctions(decisions, left_out, policy, _TABLES.setdefault(key, {}))


def _check_prices(policy: OpPolicy, prices: Sequence[ChoosesRungs], ops: Sequence[OpPolicy]) -> None:
    if len(prices) > 1:
        raise PolicyError(f"the policy {policy!r} has two memory budgets", remedy="Give one share of the bytes.")
    if any(not part.left_out() for part in ops):
        raise PolicyError(
            f"the policy {policy!r} decides about ops, and by price about functions",
            remedy="A memory budget goes with functions such as F.linear, with remat.save_modules, and with "
            "& ~remat.save_names(...). Use the functions that user code calls in place of their ops.",
        )


_read: Callable[[Any], OpPolicy]


def read_by(read: Callable[[Any], OpPolicy]) -> None:
    """Set what makes a policy of what users give, for ``|``: it knows all kinds of policy, which know this file."""
    global _read
    _read = read
