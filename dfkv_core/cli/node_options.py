"""The options that `dfkv serve`, `dfkv node` and `dfkv mds` share: where they listen, who may talk to them, what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HostOption = Annotated[str | None, typer.Option(help="Address to listen on (default 127.0.0.1).")]
PortOption = Annotated[int | None, typer.Option(help="Port to listen on (default 7440; 0 takes a free one).")]
SecretFileOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Shared secret; needed unless on loopback.")
]
InsecureOption = Annotated[
    bool | None, typer.Option("--insecure", help="Allow a non-loopback address without a secret.")
]
RamOption = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory for cached KV (default 4GiB).")]
DirectoriesOption = Annotated[
    list[Path] | None,
    typer.Option("--dir", metavar="DIR", help="Directory for cached KV on disk; may be given several times."),
]
CapacityOption = Annotated[str | None, typer.Option(metavar="SIZE", help="Space that each directory takes.")]
NodeIdOption = Annotated[str | None, typer.Option(help="Stable name of this node (default: host name and port).")]
ThreadsOption = Annotated[int | None, typer.Option(help="Reactor threads (default 2).")]
MetricsPortOption = Annotated[int | None, typer.Option(help="Serve Prometheus metrics on this loopback port.")]
