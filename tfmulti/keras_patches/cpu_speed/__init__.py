"""Faster forms of Keras' layers and optimizers on CPUs; the numbers stay within rounding."""
