"""Write down the public names of an onnxruntime wheel, with their signatures, as JSON on stdout.

    scripts/read_onnxruntime_names onnxruntime-1.12.1-cp310-….whl > tests/standins/maca/onnxruntime-1.12.1.json

The wheel is unpacked into a temporary folder and imported from there, so the interpreter must be one that it is made
for (the variable PYTHON names another), with a numpy of its time. Signatures of Python code are read by ``inspect``,
those of compiled code from the first line of its docstring.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import re
import sys
import tempfile
import zipfile
from typing import Any

STATE = "onnxruntime.capi.onnxruntime_pybind11_state."


def signature(name: str, member: Any) -> str:
    """The parameters of ``member``, without self and annotations of its own module."""
    if inspect.isfunction(member):
        parameters = [
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in inspect.signature(member).parameters.values()
            if parameter.name != "self"
        ]
        return str(inspect.Signature(parameters))
    lines = (member.__doc__ or "").splitlines()
    found = re.match(rf"{re.escape(name)}\((.*?)\)(?: -> .*)?$", lines[0] if lines else "")
    if found is None:
        return "(?)"
    return "(" + re.sub(r"self: [^,]+(, )?", "", found.group(1).replace(STATE, ""), count=1) + ")"


def members(owner: type) -> dict[str, str]:
    """Public members of a class and its bases: a signature, "property", or "value" for those of an enumeration."""
    found: dict[str, str] = {}
    for name in sorted(set(dir(owner)) - set(dir(object)) - set(dir(enum.Enum)) | {"__init__"}):
        member = inspect.getattr_static(owner, name)
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, staticmethod):
            member = member.__func__
        if isinstance(member, owner):
            found[name] = "value"
        elif isinstance(member, property) or not callable(getattr(owner, name)):
            found[name] = "property"
        else:
            found[name] = signature(name, member)
    return found


def names(runtime: Any) -> dict[str, Any]:
    """What ``import onnxruntime`` gives: functions with signatures, and classes with their members."""
    public = {name: value for name, value in vars(runtime).items() if not name.startswith("_")}
    return {
        "package": "onnxruntime",
        "version": runtime.__version__,
        "functions": {
            name: signature(name, value)
            for name, value in sorted(public.items())
            if callable(value) and not inspect.isclass(value)
        },
        "classes": {name: members(value) for name, value in sorted(public.items()) if inspect.isclass(value)},
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(sys.argv[1]) as wheel:
            wheel.extractall(folder)
        sys.path.insert(0, folder)
        found = names(importlib.import_module("onnxruntime"))
    json.dump(found, sys.stdout, indent=1, sort_keys=False)
    print()


if __name__ == "__main__":
    main()
