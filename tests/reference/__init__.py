"""An independent implementation of docs/formats.md in plain Python. Imports nothing of dfkv: tests compare the two."""
