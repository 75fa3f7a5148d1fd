"""Metadata is in pyproject.toml, the build of coda._C in build_support."""
import os
import sys

from setuptools import setup

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from build_support.extension import BuildExt, extension  # noqa: E402

setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExt})
