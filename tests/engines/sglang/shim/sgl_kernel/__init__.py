"""Stands in for SGLang's kernels on a CPU: the few operations that serving reaches; any other raises when called."""

__version__ = "0.4.10+cpu"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, *_):
    at = 0
    for index in range(int(req_pool_indices.numel())):
        first, last = int(start[index]), int(end[index])
        taken = out_cache_loc[at : at + last - first]
        req_to_token[int(req_pool_indices[index]), first:last] = taken.to(req_to_token.dtype)
        at += last - first


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on a CPU")

    return missing
