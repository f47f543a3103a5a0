"""Dynamic rematerialization of tensors: a bench for tensor-level policies, live and in simulation."""

from torch_remat.dtr.heuristics import HEURISTICS, Heuristic, RatioHeuristic, Storage

__all__ = ["HEURISTICS", "Heuristic", "RatioHeuristic", "Storage"]
