"""Keras callbacks that a run adds: throughput, TensorBoard, history, the model's file."""
