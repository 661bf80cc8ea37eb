"""The public names: `__all__` is what can be imported, and importing the package stays light."""

import subprocess
import sys

import dieplace


def test_every_public_name_is_there():
    for name in dieplace.__all__:
        assert getattr(dieplace, name) is not None, name
    assert sorted(dieplace.__all__) == dieplace.__all__ == dir(dieplace)


def test_names_of_the_design_are_public():
    wanted = {
        "discover", "apply", "restore", "partitioned", "audit", "load_safetensors", "Machine", "Card", "Device",
        "Domain", "Mode", "Plan", "Policy", "Buffer", "Residency", "Workload", "Run",
    }  # fmt: skip
    assert wanted <= set(dieplace.__all__)


def test_every_error_is_public():
    from dieplace import errors

    kinds = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.DieplaceError)}
    assert kinds <= set(dieplace.__all__)


def test_an_unknown_name_is_an_attribute_error():
    try:
        dieplace.no_such_name  # noqa: B018
    except AttributeError as error:
        assert "no_such_name" in str(error)
    else:
        raise AssertionError("no AttributeError")


def test_discover_stays_a_function_after_its_module_was_imported():
    code = (
        "import dieplace, dieplace.discover; from dieplace.discover import probes; assert callable(dieplace.discover)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
