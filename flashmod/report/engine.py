"""The libraries that make charts: Altair for the specification, vl-convert for what draws it."""

import importlib
from types import ModuleType
from typing import Any

Spec = dict[str, Any]
ENGINE_RESERVES = 68 << 30  # bytes of address space, measured for vl-convert 1.9


def altair() -> ModuleType:
    """The ``altair`` module, imported at first use.

    Raises:
        ImportError: altair or vl-convert-python is missing; names the extra.
    """
    try:
        import altair

        importlib.import_module("vl_convert")
    except ImportError as error:
        raise ImportError(
            f"The report page needs {error.name}: install it with pip install 'flashmod[report]'. "
            "The same figures as plain text: flashmod-report --text DIR."
        ) from error
    return altair


def _vl_convert() -> ModuleType:
    """The ``vl_convert`` module, where it can run.

    Raises:
        OSError: the address space is limited; the engine inside would end the process.
    """
    limit = _address_space()
    if limit is not None and limit < ENGINE_RESERVES:
        raise OSError(
            "the charts are drawn by vl-convert, which reserves 64 GiB of address space, but this "
            f"process may use {limit / 2**30:.1f} GiB (ulimit -v): run flashmod-report outside "
            "that limit, or flashmod-report --text here"
        )
    return importlib.import_module("vl_convert")


def _address_space() -> int | None:
    """Bytes of address space this process may use; None without a limit, or where none exists."""
    try:
        import resource
    except ImportError:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def bundle() -> str:
    """JavaScript of vega, vega-lite and vega-embed in the version the charts are made for."""
    alt = altair()
    major_minor = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    return str(_vl_convert().javascript_bundle(vl_version=major_minor))


def svg(spec: Spec, width: int = 640) -> str:
    """A chart as a picture with a white ground, for pages that run no scripts."""
    fixed = {**spec, "width": width, "background": "white"}
    schema = altair().SCHEMA_VERSION.lstrip("v").split(".")
    return str(_vl_convert().vegalite_to_svg(fixed, vl_version=".".join(schema[:2])))
