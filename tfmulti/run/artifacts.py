"""Exports the trained model, and computes the checksum of its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

import keras

from tfmulti.config.run_directory import check_new, replacing
from tfmulti.errors import ModelError
from tfmulti.training.state.model_checks import as_made


def weights_sha256(model: keras.Model) -> str:
    """Returns the SHA-256 of all weights, over the type, shape and bytes of each one in order."""
    digest = hashlib.sha256()
    for weight in model.get_weights():
        digest.update(f"{weight.dtype} {weight.shape};".encode())
        digest.update(weight.tobytes())
    return digest.hexdigest()


def export_model(model: keras.Model, saved: Path, folder: Path) -> None:
    """Writes a SavedModel for serving. Runs on the chief.

    Keras cannot export a model with mirrored variables. So the saved file is loaded again outside
    the strategy, with the classes of the model and its layers.

    Args:
        model: the trained model.
        saved: the .keras file of this model.
        folder: the folder for the SavedModel, new or empty.

    Raises:
        RunDirError: the folder is not empty, or cannot be written.
        ModelError: the saved file cannot be loaded with these classes.
    """
    check_new("export_dir", folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with as_made(model):
        classes = {type(layer).__name__: type(layer) for layer in [model, *model.layers]}
    try:
        plain = keras.saving.load_model(saved, custom_objects=classes)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"--export_dir: {saved} cannot be loaded to be exported: "
            f"{str(error).strip().splitlines()[0]} Give the model's classes a get_config, and "
            "register them with keras.saving.register_keras_serializable."
        ) from None
    with replacing(folder) as partial:
        plain.export(partial, verbose=False)
