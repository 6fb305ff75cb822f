"""Whole pages: what direct I/O wants of buffers and of places in a file."""

import mmap

PAGE_BYTES = 4096


def whole_pages(num_bytes: int) -> int:
    """The least number of bytes in whole pages that is no less."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def arena(num_bytes: int) -> mmap.mmap:
    """Zeros from the start of a page on, private to the process, in large pages where the system
    has them. Memory is taken as it is touched."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
