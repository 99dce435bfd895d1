"""Runs ``tierstore`` commands in processes of their own, without importing torch for each: a test's program.

Each line of stdin is a JSON object with ``argv``, ``stdout`` and ``stderr`` (files). The answer is two lines: ``pid`` with
the pid, at once, and ``status`` with the wait status when the process has ended. The pid is given to no other process before
the next line, so it may be signalled until then.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback


def main() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import tierstore.train.session  # noqa: F401 - so that a forked process has it
    from tierstore.cli.main import cli

    gc.freeze()  # or each process's collections would go through, and so copy, all that was imported
    print("ready", flush=True)
    pid = 0
    for line in iter(sys.stdin.readline, ""):
        if pid:
            os.waitpid(pid, 0)
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            for name, number in (("stdout", 1), ("stderr", 2)):
                target = os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.dup2(target, number)
            status = 70
            try:
                cli.main(job["argv"])
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print("pid", pid, flush=True)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        exited = ended.si_code == os.CLD_EXITED
        print("status", ended.si_status << 8 if exited else ended.si_status, flush=True)


if __name__ == "__main__":
    main()
