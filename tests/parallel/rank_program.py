"""One rank of ``launcher.Ranks``: a program that runs cases, one ``(file, function, arguments)`` after another.

Arguments: the socket of the test process; where the simulated device was built, if the rank is to have it. It calls back at
the socket, receives the ParallelConfig, joins its world through ``launch``, and runs cases until it is sent None.
"""

import contextlib
import importlib.util
import os
import pickle
import sys
import traceback
from multiprocessing.connection import Client
from pathlib import Path
from types import ModuleType


def main(address: str, simulated_device: str | None) -> None:
    import torch

    from tierstore.parallel import launch

    if simulated_device is not None:
        import simulated

        simulated.load(Path(simulated_device))
    device = "cpu" if simulated_device is None else "simgpu"
    with Client(address, "AF_UNIX") as test:
        test.send(os.getpid())
        with contextlib.suppress(EOFError), launch(test.recv(), device=device) as mesh:
            test.send(mesh.environment.rank)
            modules: dict[str, ModuleType] = {}
            while (case := pickle.loads(test.recv_bytes())) is not None:
                torch.set_num_threads(1)  # whatever the case before has left
                file, name, arguments = case
                try:
                    function = getattr(_module(file, modules), name)
                    answer = (True, function(mesh, *arguments))
                except BaseException:
                    answer = (False, traceback.format_exc())
                test.send_bytes(pickle.dumps(answer))


def _module(file: str, loaded: dict[str, ModuleType]) -> ModuleType:
    if file not in loaded:
        spec = importlib.util.spec_from_file_location(f"cases_{len(loaded)}", file)
        loaded[file] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loaded[file]
        spec.loader.exec_module(loaded[file])
    return loaded[file]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
