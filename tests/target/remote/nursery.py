"""Forks target servers on demand: a line of JSON with what a server is made with on stdin, one with
where it is on stdout."""

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
        asked = json.loads(line)
        address = Address(port=asked["port"])
        with bind(address) as bound:
            bound.listen(128)
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                if asked["stderr"]:
                    os.dup2(os.open(asked["stderr"], os.O_WRONLY | os.O_CREAT), 2)
                backend = HFEagle3TargetModel(model, supervision="hidden")
                limits = Limits(**{"max_requests": 12, **asked["limits"]})
                server = TargetServer(backend, model="tiny", limits=limits)
                serve(server, address, bound, drain_s=asked["drain_s"])
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
