"""Maps the top-level folders to one import package; everything else is in pyproject.toml.

A short setup.py because `tool.setuptools.packages.find` cannot add a prefix, and an explicit list silently
drops a forgotten sub-package from the wheel.
"""

from setuptools import find_packages, setup

ROOTS = {
    "dieplace": "dieplace",
    "dieplace.kernels": "kernels",
    "dieplace.cli": "cli",
    "dieplace.experiments": "experiments",
}
setup(
    package_dir=ROOTS,
    packages=[
        ".".join(filter(None, (name, sub))) for name, folder in ROOTS.items() for sub in ("", *find_packages(folder))
    ],
)
