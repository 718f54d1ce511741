"""Fault injection: a TCP proxy that damages replies on purpose, and servers that can be killed and
restarted quickly."""

import asyncio
import multiprocessing
import os
import random
import socket
import threading
from pathlib import Path


class Proxy:
    """Forwards connections to `port` and damages some of the replies; by default none.

    `mischief` maps a kind of fault to the share of reply chunks that it hits: `cut` closes the
    connection in the middle of a reply, `garble` changes one byte, `stall` pauses for `stall_s`,
    `trickle` sends a few bytes at a time. Chunks of less than `spare` bytes are left alone.
    """

    def __init__(self, port, *, seed=0, mischief=None, stall_s=3.0, spare=0):
        self.target, self.mischief, self.stall_s = port, mischief or {}, stall_s
        self.spare = spare
        self.done = dict.fromkeys(("cut", "garble", "stall", "trickle"), 0)
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self):
        async def stop():
            self._server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(timeout=20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=20)

    async def _serve(self, reader, writer):
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        pumps = [self._requests(reader, up_writer), self._replies(up_reader, writer)]
        tasks = [asyncio.create_task(pump) for pump in pumps]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for end in (writer, up_writer):
                end.transport.abort()

    async def _requests(self, reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    async def _replies(self, reader, writer):
        while data := await reader.read(1 << 16):
            kind = self._choose_fault() if len(data) >= self.spare else None
            if kind == "cut":
                writer.write(data[: self._random.randrange(len(data))])
                await writer.drain()
                return
            if kind == "garble":
                at = self._random.randrange(len(data))
                data = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
            elif kind == "stall":
                await asyncio.sleep(self.stall_s)
            elif kind == "trickle":
                for at in range(0, min(len(data), 400), 40):
                    writer.write(data[at : at + 40])
                    await writer.drain()
                    await asyncio.sleep(0.005)
                data = data[400:]
            writer.write(data)
            await writer.drain()

    def _choose_fault(self):
        draw = self._random.random()
        for kind, share in self.mischief.items():
            draw -= share
            if draw < 0:
                self.done[kind] += 1
                return kind
        return None


class Nursery:
    """Servers of the tiny target in processes that are forked from one in which torch is loaded: a
    restart takes milliseconds."""

    def __init__(self):
        self._context = multiprocessing.get_context("forkserver")
        modules = ["fledge.target.hf.model", "fledge.target.remote.server.run", __name__]
        self._context.set_forkserver_preload(modules)
        self._processes = {}

    def start(self, port=0):
        """Start a server; returns (pid, port)."""
        listening, told = self._context.Pipe(duplex=False)
        process = self._context.Process(target=serve_tiny, args=(told, port), daemon=True)
        process.start()
        self._processes[process.pid] = process
        return process.pid, listening.recv()

    def kill(self, pid):
        self._processes[pid].kill()
        self._processes.pop(pid).join()

    def close(self):
        for pid in list(self._processes):
            self.kill(pid)


def serve_tiny(told, port):
    from fledge.target.hf.model import HFEagle3TargetModel
    from fledge.target.remote.server.app import TargetServer
    from fledge.target.remote.server.run import Address, serve
    from target.tiny_models import tiny_model

    address = Address(port=port)
    with address.bind() as bound:
        bound.listen(128)
        told.send(bound.getsockname()[1])
        backend = HFEagle3TargetModel(tiny_model("llama"), supervision="hidden")
        serve(TargetServer(backend, model="tiny", max_requests=12), address, bound)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
