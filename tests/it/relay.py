"""A cable between two network namespaces that delays and loses packets: two TUN devices, and what carries packets between them.

    relay.py NAMESPACE_A NAMESPACE_B DELAY_MS LOSS

The devices are `cable-a` and `cable-b`; every packet comes out of the other one after DELAY_MS, unless it is among the share LOSS
that is lost. Prints `ready`; runs until it is killed. A signal USR1 stalls the cable until the next one. Requires root.
"""

import fcntl
import heapq
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time

SET_INTERFACE = 0x400454CA
TUN_WITHOUT_HEADER = 0x0001 | 0x1000
LARGEST_PACKET = 65536


def device(name: str, namespace: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, SET_INTERFACE, struct.pack("16sH", name.encode(), TUN_WITHOUT_HEADER))
    subprocess.run(["ip", "link", "set", name, "netns", namespace], check=True)
    return file


def main() -> None:
    namespaces, delay_s, loss = sys.argv[1:3], float(sys.argv[3]) / 1e3, float(sys.argv[4])
    ends = [device(f"cable-{end}", namespace) for end, namespace in zip("ab", namespaces)]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    lost, waiting, number, stalled = random.Random(0), [], 0, False

    def stall(*_: object) -> None:
        nonlocal stalled
        stalled = not stalled

    signal.signal(signal.SIGUSR1, stall)
    print("ready", flush=True)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now and not stalled:
            _, _, end, packet = heapq.heappop(waiting)
            try:
                os.write(end, packet)
            except OSError:
                pass  # The device is down, or its queue is full: the packet is lost.
        limit = max(waiting[0][0] - time.monotonic(), 0) if waiting and not stalled else 0.1
        for end in select.select(ends, [], [], limit)[0]:
            for _ in range(16):
                try:
                    packet = os.read(end, LARGEST_PACKET)
                except OSError:
                    break
                if lost.random() >= loss:
                    number += 1
                    heapq.heappush(waiting, (time.monotonic() + delay_s, number, other[end], packet))


main()
