"""Dynamic rematerialization of tensors: a bench for tensor-level policies, live and in simulation."""

from torch_remat.dtr._tensor import EvictableTensor
from torch_remat.dtr.bounds import chen_chain, optimal_chain
from torch_remat.dtr.budget import Runtime, budget, record
from torch_remat.dtr.heuristics import HEURISTICS, Heuristic, RatioHeuristic, Storage
from torch_remat.dtr.log import Log, LogError, LogWriter
from torch_remat.dtr.recomputable import RecomputableTensor, recomputable
from torch_remat.dtr.simulate import Simulation, simulate
from torch_remat.errors import BudgetError

__all__ = [
    "HEURISTICS",
    "BudgetError",
    "EvictableTensor",
    "Heuristic",
    "Log",
    "LogError",
    "LogWriter",
    "RatioHeuristic",
    "RecomputableTensor",
    "Runtime",
    "Simulation",
    "Storage",
    "budget",
    "chen_chain",
    "optimal_chain",
    "recomputable",
    "record",
    "simulate",
]
