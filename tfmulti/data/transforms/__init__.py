"""What is done to examples after they are read: split, cache, encode, augment, weight.

`stages` applies the transforms in their fixed order.
"""
