"""A client of `serve.py`: takes files over HTTP into one buffer. It imports little, so that many of them start soon.

    http_get.py HOST:PORT PATH...

Says "ready", waits for a line, and prints when it began and ended.
"""

from __future__ import annotations

import hashlib
import socket
import sys
import time

BUFFER_BYTES = 1 << 20


def get(host: str, port: int, path: str, digest: bool = False) -> tuple[int, str]:
    """Bytes of the body, and their digest if it is asked for."""
    buffer = bytearray(BUFFER_BYTES)
    view = memoryview(buffer)
    sums = hashlib.sha256()
    with socket.create_connection((host, port)) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        count = client.recv_into(buffer)
        head, _, first = bytes(view[:count]).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = int(next(line.split(b":")[1] for line in head.lower().splitlines() if line.startswith(b"content-length")))
        done = len(first)
        sums.update(first if digest else b"")
        while done < length:
            count = client.recv_into(buffer)
            assert count, f"{path}: {done} of {length} bytes"
            if digest:
                sums.update(view[:count])
            done += count
    return done, sums.hexdigest()


def main() -> None:
    host, port = sys.argv[1].rsplit(":", 1)
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.monotonic()
    for path in sys.argv[2:]:
        get(host, int(port), path)
    print(begin, time.monotonic())


if __name__ == "__main__":
    main()
