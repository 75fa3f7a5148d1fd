"""Finds the CUTLASS headers and checks their version. third_party/README.md says why it is done this way.

    python third_party/cutlass.py            print the include folder, or one line on stderr and exit code 1
    python third_party/cutlass.py --wheel    print the pip requirement that brings the pinned version

It needs nothing but the standard library: setup.py imports it, CMakeLists.txt runs it.
"""
from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import sys
from typing import Iterable, Mapping

VERSION = "4.2.0"
WHEEL = f"nvidia-cutlass=={VERSION}.0"
IN_WHEEL = pathlib.Path("cutlass_library", "source", "include")


class CutlassError(Exception):
    """One sentence for the user."""


class CutlassMissing(CutlassError):
    pass


@dataclasses.dataclass(frozen=True)
class Cutlass:
    include: pathlib.Path
    version: str


def read_version(include: pathlib.Path) -> str:
    text = (include / "cutlass" / "version.h").read_text()
    parts = [re.search(rf"#define\s+CUTLASS_{name}\s+(\d+)", text) for name in ("MAJOR", "MINOR", "PATCH")]
    if not all(parts):
        raise CutlassError(f"{include}/cutlass/version.h does not define CUTLASS_MAJOR, CUTLASS_MINOR and CUTLASS_PATCH.")
    return ".".join(p[1] for p in parts)


def find_include(environ: Mapping[str, str], path: Iterable[str]) -> pathlib.Path:
    """CUTLASS_PATH, else the wheel's headers. `path` is sys.path: importing cutlass_library would pull in what we do not need."""
    given = environ.get("CUTLASS_PATH")
    if given:
        for include in (pathlib.Path(given), pathlib.Path(given) / "include"):
            if (include / "cutlass" / "version.h").is_file():
                return include.resolve()
        raise CutlassMissing(f"CUTLASS_PATH={given} has no cutlass/version.h, neither there nor in its include folder.")
    for entry in path:
        include = pathlib.Path(entry or ".") / IN_WHEEL
        if (include / "cutlass" / "version.h").is_file():
            return include.resolve()
    hint = f"set CUTLASS_PATH to a CUTLASS {VERSION} checkout, or pip install --no-deps {WHEEL}"
    raise CutlassMissing(f"The CUTLASS headers were not found: {hint}.")


def find(environ: Mapping[str, str] = os.environ, path: Iterable[str] | None = None) -> Cutlass:
    include = find_include(environ, sys.path if path is None else path)
    version = read_version(include)
    if version != VERSION and environ.get("CODA_ALLOW_CUTLASS_VERSION") != "1":
        hint = "CODA_ALLOW_CUTLASS_VERSION=1 builds them all the same"
        raise CutlassError(f"{include} is CUTLASS {version}, but the kernels are written for {VERSION} ({hint}).")
    return Cutlass(include, version)


def main() -> None:
    if sys.argv[1:] == ["--wheel"]:
        print(WHEEL)
        return
    try:
        print(find().include)
    except CutlassError as e:
        sys.exit(str(e))


if __name__ == "__main__":
    main()
