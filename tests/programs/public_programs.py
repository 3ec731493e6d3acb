"""Lists the public programs that `public` runs: their repositories and paths."""

from __future__ import annotations

_EXAMPLES = {
    "generative": [
        "conditional_gan",
        "ddim",
        "ddpm",
        "pixelcnn",
        "real_nvp",
        "vae",
        "vq_vae",
        "wgan_gp",
    ],
    "keras_recipes": [
        "antirectifier",
        "endpoint_layer_pattern",
        "subclassing_conv_layers",
        "tensorflow_numpy_models",
        "trainer_pattern",
    ],
    "nlp": ["addition_rnn", "bidirectional_lstm_imdb", "text_classification_with_transformer"],
    "timeseries": [
        "timeseries_classification_from_scratch",
        "timeseries_classification_transformer",
    ],
    "structured_data": ["collaborative_filtering_movielens"],
    "vision": [
        "attention_mil_classification",
        "autoencoder",
        "cct",
        "convmixer",
        "cutmix",
        "eanet",
        "gradient_centralization",
        "image_classification_with_vision_transformer",
        "involution",
        "knowledge_distillation",
        "metric_learning",
        "mixup",
        "mlp_image_classification",
        "mnist_convnet",
        "perceiver_image_classification",
        "semantic_image_clustering",
        "shiftvit",
        "siamese_contrastive",
        "simsiam",
        "supervised_contrastive_learning",
        "swim_transformers",
        "token_learner",
    ],
}
_GUIDES = [
    "custom_train_step_in_tensorflow",
    "functional_api",
    "making_new_layers_and_models_via_subclassing",
    "sequential_model",
    "training_with_built_in_methods",
    "transfer_learning",
    "writing_your_own_callbacks",
]
_TUTORIALS = [
    "distribute/keras",
    "generative/autoencoder",
    "images/cnn",
    "keras/classification",
    "quickstart/beginner",
]

PUBLIC: dict[str, tuple[str, str]] = {
    **{
        name: ("keras_io", f"examples/{folder}/{name}.py")
        for folder, names in _EXAMPLES.items()
        for name in names
    },
    **{f"guide_{name}": ("keras_io", f"guides/{name}.py") for name in _GUIDES},
    **{
        f"tutorial_{path.replace('/', '_')}": (
            "tensorflow_docs",
            f"site/en/tutorials/{path}.ipynb",
        )
        for path in _TUTORIALS
    },
}
