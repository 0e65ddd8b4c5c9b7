"""`python -m oasiskv.serve.launch PARENT_PID PROGRAM ARG...`: become PROGRAM, to be killed by the kernel when the parent ends.

A process of its own because a Python that has threads, as the supervisor has through gRPC, must not run code between fork and exec.
"""

from __future__ import annotations

import os
import sys

from oasiskv.executor.parent import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
