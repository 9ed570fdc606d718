"""`dfkv plan`: replays a trace of requests and says what a cache would be worth for it, before anything is deployed."""
