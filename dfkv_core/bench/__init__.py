"""What `dfkv bench` measures on the wire: put, get and exists, each next to the ceiling of this machine in the same run."""
