"""Side-by-side measurements of torch_remat and its peers: ``python -m benchmarks``."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch loads: no lines about each profile
