"""dfkv beside other stores on this machine, in one run: `make bench-peers`. What is not installed is named and left out."""
