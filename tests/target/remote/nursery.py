"""Forks target servers on demand: one line with a port on stdin, one line of JSON on stdout."""

import json
import os
import signal
import sys
import time


def bind(address):
    """The port of a server that was killed a moment ago: its last breath may take a while."""
    from fledge.core.errors import BadInput

    deadline = time.monotonic() + 10
    while True:
        try:
            return address.bind()
        except BadInput:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def main():
    from fledge.target.hf.model import HFEagle3TargetModel
    from fledge.target.remote.server.admission import Limits
    from fledge.target.remote.server.app import TargetServer
    from fledge.target.remote.server.run import Address, serve
    from target.tiny_models import tiny_model

    model = tiny_model("llama")
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # killed children are nobody's zombies
    children = []
    for line in sys.stdin:
        address = Address(port=int(line))
        with bind(address) as bound:
            bound.listen(128)
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                backend = HFEagle3TargetModel(model, supervision="hidden")
                limits = Limits(max_requests=12)
                serve(TargetServer(backend, model="tiny", limits=limits), address, bound)
                os._exit(0)
            children.append(pid)
            print(json.dumps({"pid": pid, "port": bound.getsockname()[1]}), flush=True)
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
