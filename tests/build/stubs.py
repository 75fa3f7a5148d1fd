"""A toolkit whose nvcc only writes its output files, and a CUTLASS that is nothing but a version header."""
import pathlib
import stat

STUB_NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release @RELEASE@, V@RELEASE@.88"; exit ;;
  --dryrun) exit ;;
esac
while [ $# -gt 0 ]; do
  case "$1" in
    -o) out=$2; shift ;;
    -MF) dep=$2; shift ;;
    -c) src=$2; shift ;;
  esac
  shift
done
echo partial > "$out"
if grep -q '#error' "$src"; then echo "$src: error: #error"; exit 2; fi
echo "$src" >> "@LOG@"
echo "$out: $src" $(sed -n 's/^#include "\\(\\/.*\\)"/\\1/p' "$src") > "$dep"
echo object > "$out"
"""


def write_toolkit(root: pathlib.Path, release: str = "13.0") -> pathlib.Path:
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(STUB_NVCC.replace("@RELEASE@", release).replace("@LOG@", str(root / "log")))
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    return root


def write_cutlass(root: pathlib.Path, version: str) -> pathlib.Path:
    header = root / "include" / "cutlass" / "version.h"
    header.parent.mkdir(parents=True)
    names = zip(("MAJOR", "MINOR", "PATCH"), version.split("."))
    header.write_text("#pragma once\n" + "".join(f"#define CUTLASS_{name} {number} \n" for name, number in names))
    return root
