"""Stores keep block bytes in one place each: host memory, disk. They decide nothing."""
