"""Creates the Makefile's virtual environment.

    python build_support/make_venv.py FOLDER

When the Python that runs this has a torch that is new enough, the environment sees all of that Python's packages, and nothing that they
satisfy is downloaded. That also holds for a Python in a virtual environment, whose packages --system-site-packages would not show.
"""
import importlib.util
import pathlib
import site
import subprocess
import sys
import venv

TORCH = (2, 8)


def usable_torch():
    """The version of this Python's torch, None if there is none or it is too old. In another process: importing it may crash."""
    code = "import torch; print(torch.__version__)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    version = done.stdout.strip()
    return version if done.returncode == 0 and tuple(map(int, version.split(".")[:2])) >= TORCH else None


def main():
    folder = pathlib.Path(sys.argv[1])
    if not (3, 10) <= sys.version_info[:2] < (3, 14):
        sys.exit(f"coda: {sys.executable} is Python {sys.version.split()[0]}; 3.10 to 3.13 are supported, choose one with make PYTHON=...")
    torch = usable_torch()
    # The shared packages may bring pip: then ensurepip, which some systems leave out, is not needed.
    with_pip = not (torch and importlib.util.find_spec("pip"))
    venv.create(folder, clear=True, symlinks=True, with_pip=with_pip)
    if not torch:
        return
    print(f"coda: {folder} uses torch {torch} and the other packages of {sys.executable}")
    packages = next(folder.glob("lib/python3*/site-packages"))
    folders = [p for p in site.getsitepackages() if pathlib.Path(p).is_dir()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    lines = [f"import site; site.addsitedir({p!r})" for p in folders]  # unlike a plain path, it reads the .pth files there
    (packages / "coda_shared_packages.pth").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
