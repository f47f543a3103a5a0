"""Refuses a torch that is too old, before an import of what it lacks fails with a text that explains nothing."""

import torch

OLDEST_TORCH = (2, 10)  # pyproject.toml says the same to pip


def require_torch(version: str) -> None:
    """Raise unless this release of torch is new enough; a version that is no number passes.

    Args:
        version: As ``torch.__version__`` has it.

    Raises:
        ImportError: It is older than 2.10.
    """
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    if major.isdecimal() and minor.isdecimal() and (int(major), int(minor)) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"torch_remat needs torch {oldest} or newer, and this is torch {version} ({torch.__file__}).\n"
            f"Install a newer one in this environment: pip install 'torch>={oldest}'"
        )


require_torch(torch.__version__)
