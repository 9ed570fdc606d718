"""Runs inside Mooncake's environment, without dfkv: one process that holds a segment, one that is its client.

usage: mooncake_child.py store MASTER HOST RAM_BYTES      says {"ready": true} and holds the segment until its input ends
       mooncake_child.py client MASTER HOST               takes a line of JSON for each step and answers with one

Steps: {"op": "memory", "path", "bytes"} registers that file's memory, which the measuring process shares; {"op": "put" | "get", "keys",
"size"} answers {"seconds"}; {"op": "remove", "keys"}. Whatever fails answers {"error"}.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
import time
from typing import Any

from mooncake.store import MooncakeDistributedStore

SERVER_BUFFER_BYTES = 16 << 20


def connect(master: str, host: str, segment_bytes: int) -> Any:
    store = MooncakeDistributedStore()
    code = store.setup(host, "P2PHANDSHAKE", segment_bytes, SERVER_BUFFER_BYTES, "tcp", "", master)
    if code:
        raise RuntimeError(f"setup() gave {code}")
    return store


class Client:
    def __init__(self, store: Any) -> None:
        self.store = store
        self.memory: mmap.mmap | None = None
        self.base = 0

    def step(self, order: dict[str, Any]) -> dict[str, Any]:
        op = order["op"]
        if op == "memory":
            return self.register(order["path"], order["bytes"])
        keys = order["keys"]
        if op == "remove":
            self.store.batch_remove(keys, True)
            return {}
        size = order["size"]
        places = [self.base + i * size for i in range(len(keys))]
        sizes = [size] * len(keys)
        move = self.store.batch_put_from if op == "put" else self.store.batch_get_into
        began = time.perf_counter()
        codes = move(keys, places, sizes)
        seconds = time.perf_counter() - began
        wanted = 0 if op == "put" else size
        wrong = sorted({code for code in codes if code != wanted})
        return {"error": f"{op} gave {wrong[:5]}"} if wrong else {"seconds": seconds}

    def register(self, path: str, length: int) -> dict[str, Any]:
        if self.memory is not None:
            self.store.unregister_buffer(self.base)
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), length)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        code = self.store.register_buffer(self.base, length)
        return {"error": f"register_buffer() gave {code}"} if code else {}


def main() -> None:
    role, master, host = sys.argv[1:4]
    if role == "store":
        store = connect(master, host, int(sys.argv[4]))
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.read()
    else:
        store = connect(master, host, 0)
        client = Client(store)
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(client.step(json.loads(line))), flush=True)
    store.close()


if __name__ == "__main__":
    main()
