"""The ablations: one file each, one harness, committed results."""

if __name__ != "dieplace.experiments":
    raise ImportError(
        f"this folder is imported as dieplace.experiments, not as {__name__}: install dieplace (pip install -e .)"
    )
