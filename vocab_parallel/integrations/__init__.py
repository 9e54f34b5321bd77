"""The sharded embedding, head and loss inside training stacks that people already run, one module or package a host.

None of them is imported here, and they do not import each other: a host is needed only by those who use it.
"""
