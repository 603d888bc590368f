"""A worker of tests/processes.py: runs functions of test modules, in one gloo group with others.

It finds a function again by its file, so that tests need not be importable.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
import types
import warnings
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loopwright.distributed.process import ProcessState
from loopwright.distributed.random import set_seed


def _load(file: str, module_name: str) -> Any:
    """The module of a file under the name that it has in the test process, so that its classes can be unpickled."""
    folder = Path(__file__).parent
    if folder.name not in sys.modules:
        # A package of its own: with the root on the path, its folders would be packages as well.
        package = types.ModuleType(folder.name)
        package.__path__ = [str(folder)]
        sys.modules[folder.name] = package
    if module_name.startswith(f"{folder.name}."):
        return importlib.import_module(module_name)
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return sys.modules[module_name]


def _serve(address: str) -> None:
    """Answer requests until the connection is closed."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    state = ProcessState(cpu=True)
    with Client(address, "AF_UNIX") as connection:
        connection.send(state.process_index)
        while True:
            try:
                file, module_name, qualname, args, folder = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.register(signal.SIGUSR1)  # anew: who sets a handler and puts it back ends this one
            set_seed(0)
            os.chdir(folder)
            try:
                function = _load(file, module_name)
                for part in qualname.split("."):
                    function = getattr(function, part)
                answer = (True, function(*args))
                dist.barrier()
            except BaseException:  # noqa: BLE001 - told to the test
                answer = (False, traceback.format_exc())
            connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose folders have the names of packages
    _serve(sys.argv[1])
