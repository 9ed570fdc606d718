"""Copies of KV between device and host pools, which are both in host memory here, in plain torch.

lf: one tensor for each layer, [slot, ...]. pf: page first, layers inside. ph: pages, heads, slots, layers.
"""

import ctypes

import torch


def _bytes_at(pointer, rows, row_bytes):
    """Memory as uint8 [rows, row_bytes], without a copy."""
    memory = (ctypes.c_uint8 * (rows * row_bytes)).from_address(int(pointer))
    return torch.frombuffer(memory, dtype=torch.uint8).view(rows, row_bytes)


def _page_numbers(indices, page_size):
    return indices.long()[::page_size] // page_size


# ---- the direct backend: indices on the host, whole pages


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices.long()] = src[src_indices.long()].reshape(-1, *dst.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    layers = len(src_ptrs) // len(dst_ptrs)
    pages = _page_numbers(dst_indices, page_size)
    for group, dst in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[group * layers + layer][src_indices.long()]
            dst[pages, layer] = rows.reshape(len(pages), page_size, *dst.shape[3:])


def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    pages = _page_numbers(src_indices, page_size)
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices.long()] = src[pages, layer_id].reshape(-1, *dst.shape[1:])


# ---- the kernel backend: tables of pointers


def transfer_kv_per_layer(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, item_size, **_):
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size)


def transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size, **_):
    dst[dst_indices.long()] = src[src_indices.long()].reshape(-1, *dst.shape[1:])


def transfer_kv_all_layer(
    src_k_layers, dst_k_layers, src_v_layers, dst_v_layers, src_indices, dst_indices, item_size, num_layers, **_
):
    for src, dst in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(src, dst, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_all_layer_mla(src_layers, dst_layers, src_indices, dst_indices, item_size, num_layers, **_):
    src_rows, dst_rows = src_indices.long(), dst_indices.long()
    most_src, most_dst = int(src_rows.max()) + 1, int(dst_rows.max()) + 1
    for layer in range(num_layers):
        source = _bytes_at(src_layers[layer], most_src, item_size)
        _bytes_at(dst_layers[layer], most_dst, item_size)[dst_rows] = source[src_rows]


def transfer_kv_all_layer_lf_pf(
    src_k_layers, dst_k, src_v_layers, dst_v, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_
):
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(src, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_
):
    src_rows, dst_rows = src_indices.long(), dst_indices.long()
    most_src = int(src_rows.max()) + 1
    out = dst.view(torch.uint8).view(dst.shape[0], num_layers, -1)
    for layer in range(num_layers):
        out[dst_rows, layer] = _bytes_at(src_layers[layer], most_src, item_size)[src_rows]


def transfer_kv_per_layer_pf_lf(
    src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **_
):
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim)


def transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **_):
    dst[dst_indices.long()] = src[src_indices.long(), layer_id].reshape(-1, *dst.shape[1:])


def transfer_kv_mamba_lf_pf(src_ptrs, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers):
    src_rows, dst_rows = src_indices.long(), dst_indices.long()
    most_src = int(src_rows.max()) + 1
    out = dst.view(torch.uint8).reshape(dst.shape[0], num_layers, -1)
    assert out.data_ptr() == dst.data_ptr()
    for layer in range(num_layers):
        out[dst_rows, layer] = _bytes_at(src_ptrs[layer], most_src, item_size)[src_rows]


def transfer_kv_mamba_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim):
    dst[dst_indices.long()] = src[src_indices.long(), layer_id].reshape(-1, *dst.shape[1:])


def transfer_kv_all_layer_lf_ph(
    src_k_layers,
    dst_k,
    src_v_layers,
    dst_v,
    src_indices,
    dst_indices,
    item_size,
    dst_layout_dim,
    num_layers,
    page_size,
    head_num,
    **_,
):
    src_rows, dst_rows = src_indices.long(), dst_indices.long()
    most_src = int(src_rows.max()) + 1
    pages, offsets = dst_rows // page_size, dst_rows % page_size
    for src_layers, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        out = dst.view(torch.uint8)
        for layer in range(num_layers):
            rows = _bytes_at(src_layers[layer], most_src, item_size)[src_rows].view(len(src_rows), head_num, -1)
            for head in range(head_num):
                out[pages, head, offsets, layer] = rows[:, head]


def transfer_kv_per_layer_ph_lf(
    src_k,
    dst_k,
    src_v,
    dst_v,
    src_indices,
    dst_indices,
    layer_id,
    item_size,
    src_layout_dim,
    page_size,
    head_num,
    **_,
):
    rows = src_indices.long()
    pages, offsets = rows // page_size, rows % page_size
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        heads = [src[pages, head, offsets, layer_id] for head in range(head_num)]
        dst[dst_indices.long()] = torch.stack(heads, 1).reshape(-1, *dst.shape[1:])
