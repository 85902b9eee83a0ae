"""Shared memory between broker and workers: what lies where (pure), and the memory and links themselves (I/O)."""
