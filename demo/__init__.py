"""The main job on real engines: ``python -m demo`` measures it, ``python -m demo.bench_engine`` what it costs."""
