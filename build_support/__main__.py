"""What the Makefile, CMakeLists.txt and CI ask of the build, without torch being imported."""
from __future__ import annotations

import argparse
import os
import sys

from . import compile, settings
from .settings import ROOT, BuildError, Plan


def plan(args: argparse.Namespace) -> Plan:
    p = settings.make_plan(os.environ, settings.installed_torch())
    print(p.summary, *p.notes(), sep="\n", flush=True)
    return p


def missing(args: argparse.Namespace) -> None:
    try:
        print(settings.make_plan(os.environ, settings.installed_torch()).missing)
    except BuildError as e:
        if not e.missing:
            raise
        print(e.missing)


def jobs(args: argparse.Namespace) -> None:
    print(settings.job_count(os.environ))


def wheels(args: argparse.Namespace) -> None:
    print(";".join(map(str, settings.wheel_libraries(args.release))))


def compile_kernels(p: Plan, memory_limit: float | None = None) -> None:
    objects = compile.build(p, ROOT / "build" / "kernels")
    text = compile.report(objects, int(memory_limit * settings.GIB) if memory_limit else None)
    (ROOT / "build" / "kernels" / "log.txt").write_text(text + "\n")
    print(text)


def prepare(args: argparse.Namespace) -> None:
    p = plan(args)
    if p.cuda:
        compile_kernels(p)


def kernels(args: argparse.Namespace) -> None:
    archs = settings.parse_archs(os.environ.get("TORCH_CUDA_ARCH_LIST"))
    toolkit, cutlass = settings.find_tools(os.environ)
    code = settings.select_code(os.environ, archs)
    p = Plan(True, "", "", toolkit, cutlass, archs, settings.select_kernels(os.environ, code), code)
    for note in p.notes():
        print(note)
    compile_kernels(p, args.memory_limit)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m build_support", description="Parts of the build. setup.py is the usual way in.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function, text: str) -> argparse.ArgumentParser:
        p = commands.add_parser(function.__name__, help=text, description=text)
        p.set_defaults(function=function)
        return p

    command(plan, "Say which back ends setup.py would build, and why.")
    command(prepare, "The same, then compile the CUDA objects if they are part of it: pip would hide that setup.py is at it.")
    command(missing, "Print the piece that keeps the CUDA kernels from being built (torch, nvcc, version, gpu, cutlass), or nothing.")
    command(jobs, "Print how many compilers run at a time.")
    p = command(wheels, "Print the folders, separated by ';', of CUDA libraries that were installed as Python packages.")
    p.add_argument("release", help="of CUDA, such as 13.0")
    p = command(kernels, "Compile the CUDA objects, which needs neither torch nor a GPU, and print each one's time and peak memory.")
    p.add_argument("--memory-limit", type=float, metavar="GIB", help="fail when a file takes more than this")
    args = parser.parse_args()
    try:
        args.function(args)
    except BuildError as e:
        sys.exit(f"coda: {e}")


if __name__ == "__main__":
    main()
