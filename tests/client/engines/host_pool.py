"""A host pool as SGLang's are: what HiCacheStorage is given to read and write, for one layout or another."""

from __future__ import annotations

import torch


class HostPool:
    """K and V of some pages in host memory. `layer_first`: [2, layers, slots, ...], so that a page lies in pieces;
    `page_first`: [2, slots, layers, ...], K in one piece and V in another."""

    def __init__(self, layout: str, pages: int = 8, page_size: int = 4, layers: int = 3, dtype=torch.bfloat16) -> None:
        self.layout = layout
        self.page_size = page_size
        self.layer_num = layers
        self.head_num = 2
        self.head_dim = 8
        self.dtype = dtype
        slots = pages * page_size
        inner = (layers, slots) if layout == "layer_first" else (slots, layers)
        self.kv_buffer = torch.randn(2, *inner, self.head_num, self.head_dim).to(dtype)

    def _page(self, index: int) -> torch.Tensor:
        end = index + self.page_size
        return self.kv_buffer[:, :, index:end] if self.layout == "layer_first" else self.kv_buffer[:, index:end]

    # What SGLang's host pools have.

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self._page(int(index))
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self._page(0)).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self._page(int(index))
        page.copy_(data_page.view(page.shape))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        addresses, sizes = [], []
        for index in indices[:: self.page_size].tolist():
            page = self._page(index)
            pieces = [page[kv] for kv in range(2)]
            if self.layout == "layer_first":
                pieces = [page[kv, layer] for layer in range(self.layer_num) for kv in range(2)]
            for piece in pieces:
                assert piece.is_contiguous()
                addresses.append(piece.data_ptr())
                sizes.append(piece.numel() * piece.element_size())
        return addresses, sizes
