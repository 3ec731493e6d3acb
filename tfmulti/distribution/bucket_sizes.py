"""How many bytes of gradients travel at a time."""

# The bytes of gradients that workers sum at a time (docs/measurements.md: packs of 500 KB).
PACK_BYTES = 500_000
# Shorter messages are gathered and then summed: they travel one way instead of two.
GATHER_BYTES = 32_768
