"""A small run of each release, in a folder with its version; later versions must read them all.

`make.py` made them; `small.py` is their code, which must not change.
"""
