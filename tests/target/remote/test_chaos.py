"""Eight trainers, two servers and two thousand batches, with killed servers and damaged replies."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.remote.client import RemoteEagle3TargetModel
from target.contract import packed_rows
from target.remote.chaos import Nursery, Proxy, free_port, resident_bytes
from target.remote.servers import tiny

CLIENTS, EACH, KINDS = 8, 250, 40
MISCHIEF = {"cut": 0.02, "garble": 0.01, "stall": 0.004, "trickle": 0.03}


def questions():
    """Packed rows of many sizes, all different."""
    rng = random.Random(0)
    batches = []
    for _ in range(KINDS):
        documents = [
            [[rng.randrange(3, 90) for _ in range(rng.randint(1, 9))] for _ in range(2)]
            for _ in range(rng.randint(1, 3))
        ]
        batches.append(packed_rows(documents, 20))
    return batches


def client(number, urls, batches, expected, finished):
    """Request batches in this client's own order; the answers must come in that order."""
    order = [(number * 7 + step * 11) % KINDS for step in range(EACH)]
    with RemoteEagle3TargetModel(
        urls, prefetch=3, timeout_s=8.0, retries=100, wait_s=60.0
    ) as target:
        waiting = []
        for kind in order:
            waiting.append((kind, target.generate_batch_async(*batches[kind])))
            if len(waiting) > 5:
                check(*waiting.pop(0), expected)
                finished.release()
        for kind, future in waiting:
            check(kind, future, expected)
            finished.release()


def check(kind, future, expected):
    batch = future.result(timeout=100)
    for name, tensor in expected[kind].tensors():
        assert torch.equal(getattr(batch, name), tensor), name


@pytest.mark.slow  # 2,000 batches
def test_every_batch_arrives_once_in_order_and_correct():
    batches = questions()
    local = HFEagle3TargetModel(tiny(), supervision="hidden")
    expected = [local.generate_batch(*rows) for rows in batches]
    nursery = Nursery()
    servers = [nursery.start(free_port()) for _ in range(2)]
    proxies = [
        Proxy(port, seed=seed, mischief=MISCHIEF, stall_s=6.0, spare=1000)
        for seed, (_, port) in enumerate(servers)
    ]
    finished, over, kills = threading.Semaphore(0), threading.Event(), []
    before = resident_bytes(os.getpid())

    def kill_servers():
        """Kill a server after some batches, and restart it a moment later."""
        rng = random.Random(1)
        while not over.is_set():
            for _ in range(rng.randint(120, 200)):
                while not finished.acquire(timeout=0.2):
                    if over.is_set():
                        return
            victim = rng.randrange(2)
            nursery.kill(servers[victim][0])
            kills.append(victim)
            over.wait(rng.uniform(0.05, 0.6))
            servers[victim] = nursery.start(servers[victim][1])

    killer = threading.Thread(target=kill_servers)
    killer.start()
    begin = time.monotonic()
    try:
        urls = [proxy.url for proxy in proxies]
        with ThreadPoolExecutor(CLIENTS) as pool:
            runs = [
                pool.submit(client, number, urls, batches, expected, finished)
                for number in range(CLIENTS)
            ]
            for run in runs:
                run.result()
        over.set()
        killer.join()  # which has restarted what it killed last
        server_bytes = [resident_bytes(pid) for pid, _ in servers]
    finally:
        over.set()
        killer.join()
        for proxy in proxies:
            proxy.close()
        nursery.close()
    assert len(kills) >= 5
    done = {kind: sum(proxy.done[kind] for proxy in proxies) for kind in MISCHIEF}
    assert all(done.values()), done
    assert resident_bytes(os.getpid()) - before < 200e6, "the clients' memory grew"
    assert all(size < 1.5e9 for size in server_bytes), "a server's memory grew"
    print(
        f"{CLIENTS * EACH} batches in {time.monotonic() - begin:.1f} s, {len(kills)} kills, {done}"
    )
