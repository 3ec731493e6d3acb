"""Transforms of examples that were read: split, cache, encode, augment and weight.

`run.data_stages` applies the transforms in their fixed order.
"""
