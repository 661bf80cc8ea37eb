"""The decode kernels: registry, references, FlyDSL and Triton versions."""

if __name__ != "dieplace.kernels":
    raise ImportError(
        f"this folder is imported as dieplace.kernels, not as {__name__}: install dieplace (pip install -e .)"
    )
