"""Runs one compiler command and records how it went.

    python timed.py OBJECT COMMAND...

writes OBJECT.json with the command, the seconds and the peak memory of its largest process, in bytes. A command that failed leaves neither
OBJECT nor the record, so that both together always mean a complete object.
"""
import json
import os
import subprocess
import sys
import time


def main() -> int:
    target, command = sys.argv[1], sys.argv[2:]
    record = target + ".json"
    for stale in (target, record):
        if os.path.exists(stale):
            os.unlink(stale)
    start = time.monotonic()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = code = os.waitstatus_to_exitcode(status)
    if code != 0:
        if os.path.exists(target):
            os.unlink(target)
        return code if code > 0 else 128 - code
    with open(record, "w") as f:
        json.dump({"seconds": round(time.monotonic() - start, 1), "peak_memory": usage.ru_maxrss * 1024, "command": command}, f)
    return 0


if __name__ == "__main__":
    sys.exit(main())
