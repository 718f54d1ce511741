"""Forks target servers on demand: reads the settings of a server as a line of JSON from stdin, and
writes its pid and port as a line of JSON to stdout."""

import json
import os
import signal
import sys
import time


def bind(address):
    """Bind, with retries: a server that was just killed may still hold the port."""
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
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # killed children leave no zombies
    children = []
    for line in sys.stdin:
        settings = json.loads(line)
        address = Address(port=settings["port"])
        with bind(address) as bound:
            bound.listen(128)
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                if settings["stderr"]:
                    os.dup2(os.open(settings["stderr"], os.O_WRONLY | os.O_CREAT), 2)
                backend = HFEagle3TargetModel(model, supervision="hidden")
                limits = Limits(**{"max_requests": 12, **settings["limits"]})
                server = TargetServer(backend, model="tiny", limits=limits)
                serve(server, address, bound, drain_s=settings["drain_s"])
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
