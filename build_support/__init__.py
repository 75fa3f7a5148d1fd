"""How the project is built: setup.py, the Makefile and CMakeLists.txt share what is here.

    settings.py    what to build: the environment variables, the tools found, and the reason for the back end chosen
    compile.py     the CUDA objects: one nvcc run each, through ninja or a thread pool, only what changed
    timed.py       runs one compiler command and records its time and peak memory
    extension.py   setuptools' build_ext for coda._C

`python -m build_support --help` lists the commands. Nothing here needs torch but extension.py.
"""
