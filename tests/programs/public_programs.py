"""Lists the public programs that `public` runs: their repositories, paths and changes."""

from __future__ import annotations

_EXAMPLES = {
    "generative": [
        "conditional_gan",
        "cyclegan",
        "dcgan_overriding_train_step",
        "ddim",
        "ddpm",
        "lstm_character_level_text_generation",
        "pixelcnn",
        "real_nvp",
        "text_generation_with_miniature_gpt",
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
    "nlp": [
        "addition_rnn",
        "bidirectional_lstm_imdb",
        "lstm_seq2seq",
        "masked_language_modeling",
        "ner_transformers",
        "neural_machine_translation_with_transformer",
        "text_classification_from_scratch",
        "text_classification_with_transformer",
    ],
    "timeseries": [
        "timeseries_anomaly_detection",
        "timeseries_classification_from_scratch",
        "timeseries_classification_transformer",
        "timeseries_traffic_forecasting",
    ],
    "structured_data": [
        "collaborative_filtering_movielens",
        "imbalanced_classification",
        "structured_data_classification_from_scratch",
        "structured_data_classification_with_feature_space",
    ],
    "vision": [
        "adamatch",
        "attention_mil_classification",
        "autoencoder",
        "barlow_twins",
        "cct",
        "conv_lstm",
        "convmixer",
        "cutmix",
        "eanet",
        "gradient_centralization",
        "image_captioning",
        "image_classification_with_vision_transformer",
        "involution",
        "knowledge_distillation",
        "metric_learning",
        "mirnet",
        "mixup",
        "mlp_image_classification",
        "mnist_convnet",
        "nnclr",
        "perceiver_image_classification",
        "semantic_image_clustering",
        "semisupervised_simclr",
        "shiftvit",
        "siamese_contrastive",
        "siamese_network",
        "simsiam",
        "supervised_contrastive_learning",
        "swin_transformers",
        "token_learner",
        "zero_dce",
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

# The steps of these draw numbers by `tf.random`, which tfmulti refuses. They also run with
# `keras.random` in its place, under a name with this ending.
BY_KERAS = "_by_keras_random"
_BY_TENSORFLOW = {
    "adamatch": "vision",
    "dcgan_overriding_train_step": "generative",
    "nnclr": "vision",
    "semisupervised_simclr": "vision",
    "wgan_gp": "generative",
}

PUBLIC: dict[str, tuple[str, str]] = {
    **{
        name: ("keras_io", f"examples/{folder}/{name}.py")
        for folder, names in _EXAMPLES.items()
        for name in names
    },
    **{
        name + BY_KERAS: ("keras_io", f"examples/{folder}/{name}.py")
        for name, folder in _BY_TENSORFLOW.items()
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

# Smaller sizes of programs that would take long, by the name of the file.
CONSTANTS: dict[str, dict[str, object]] = {
    "adamatch": {"DEPTH": 10},
    "barlow_twins": {"n_dense_neurons": 256, "block_layers": [1, 1, 1, 1]},
    "cyclegan": {
        "orig_img_size": (40, 40),
        "input_img_size": (32, 32, 3),
        "batch_size": 4,
        # Keras 3 accepts no other ending.
        "checkpoint_filepath": "./model_checkpoints/cyclegan.weights.h5",
    },
    # So the training has two batches. A thread might draw the augmentation of a third one before
    # the epoch ends, with plain Keras too.
    "convmixer": {"val_split": 0.2},
    "image_captioning": {
        "IMAGE_SIZE": (96, 96),
        "VOCAB_SIZE": 1000,
        "EMBED_DIM": 64,
        "FF_DIM": 64,
    },
    "imbalanced_classification": {"fname": "creditcard.csv"},
    "masked_language_modeling": {"MAX_LEN": 32, "VOCAB_SIZE": 40},
    "mirnet": {"IMAGE_SIZE": 32, "MAX_TRAIN_IMAGES": 30},
    "neural_machine_translation_with_transformer": {"vocab_size": 1000},
    "siamese_network": {"target_shape": (96, 96)},
    "text_generation_with_miniature_gpt": {"vocab_size": 1000, "maxlen": 40},
    "zero_dce": {"IMAGE_SIZE": 64, "MAX_TRAIN_IMAGES": 30},
}

# Programs that make a folder, and fail if another worker has made it. Each worker has its own.
ALONE = {"dcgan_overriding_train_step", "ner_transformers"}

# Programs of which more than two calls of `fit` are compared.
FITS = {"training_with_built_in_methods": 6}
