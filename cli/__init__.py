"""The dieplace command: one file a command group, `render.py` prints."""

if __name__ != "dieplace.cli":
    raise ImportError(
        f"this folder is imported as dieplace.cli, not as {__name__}: install dieplace (pip install -e .)"
    )
