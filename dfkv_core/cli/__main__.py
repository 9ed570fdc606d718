from dfkv_core.cli import main

main()
