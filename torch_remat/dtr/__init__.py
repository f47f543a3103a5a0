"""Dynamic rematerialization of tensors: a bench for tensor-level policies, live and in simulation."""

from torch_remat.dtr.bounds import chen_chain, optimal_chain
from torch_remat.dtr.heuristics import HEURISTICS, Heuristic, RatioHeuristic, Storage
from torch_remat.dtr.log import Log
from torch_remat.dtr.simulate import Simulation, simulate
from torch_remat.dtr.writer import LogWriter
from torch_remat.errors import LogError

__all__ = [
    "HEURISTICS",
    "Heuristic",
    "Log",
    "LogError",
    "LogWriter",
    "RatioHeuristic",
    "Simulation",
    "Storage",
    "chen_chain",
    "optimal_chain",
    "simulate",
]
