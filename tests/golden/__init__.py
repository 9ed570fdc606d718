"""Golden vectors and frames, read by the C++ tests and by the Python tests. generate.py writes them."""
