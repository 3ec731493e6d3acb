"""The parts of Keras whose numbers on replicas were compared with those of one device.

`tests/programs/keras_classes.py` trains each of them. Any other part of Keras is not known to be
exact, and neither is one that a later version of Keras adds.
"""

from __future__ import annotations

from typing import Any

import keras


def names(text: str) -> frozenset[str]:
    """Returns the names in a text, which spaces and line ends separate."""
    return frozenset(text.split())


# The names are those in `keras.layers`, `keras.losses`, `keras.metrics` and `keras.optimizers`. A
# class with several names there stands here by one of them.
LAYERS = names(
    """
    Activation ActivityRegularization AdaptiveAveragePooling1D AdaptiveAveragePooling2D
    AdaptiveAveragePooling3D AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D Add
    AdditiveAttention AlphaDropout Attention AutoContrast Average AveragePooling1D
    AveragePooling2D AveragePooling3D BatchNormalization Bidirectional CategoryEncoding
    CenterCrop Concatenate Conv1D Conv1DTranspose Conv2D Conv2DTranspose Conv3D Conv3DTranspose
    ConvLSTM1D ConvLSTM2D ConvLSTM3D Cropping1D Cropping2D Cropping3D CutMix Dense
    DepthwiseConv1D DepthwiseConv2D Discretization Dot Dropout ELU EinsumDense Embedding
    Equalization Flatten GRU GRUCell GaussianDropout GaussianNoise GlobalAveragePooling1D
    GlobalAveragePooling2D GlobalAveragePooling3D GlobalMaxPooling1D GlobalMaxPooling2D
    GlobalMaxPooling3D GroupNormalization GroupQueryAttention Hashing Identity InputLayer
    IntegerLookup LSTM LSTMCell LayerNormalization LeakyReLU Masking MaxPooling1D MaxPooling2D
    MaxPooling3D Maximum Minimum MixUp MultiHeadAttention Multiply Normalization PReLU Permute
    RMSNormalization RNN RandAugment RandomBrightness RandomColorDegeneration RandomColorJitter
    RandomContrast RandomCrop RandomElasticTransform RandomErasing RandomFlip RandomGaussianBlur
    RandomGrayscale RandomHue RandomInvert RandomPerspective RandomPosterization RandomRotation
    RandomSaturation RandomSharpness RandomShear RandomTranslation RandomZoom ReLU RepeatVector
    Rescaling Reshape Resizing ReversibleEmbedding SeparableConv1D SeparableConv2D SimpleRNN
    SimpleRNNCell Softmax Solarization SpatialDropout1D SpatialDropout2D SpatialDropout3D
    SpectralNormalization StackedRNNCells Subtract TimeDistributed UnitNormalization
    UpSampling1D UpSampling2D UpSampling3D ZeroPadding1D ZeroPadding2D ZeroPadding3D
    """
)
LOSSES = names(
    """
    BinaryCrossentropy BinaryFocalCrossentropy CategoricalCrossentropy
    CategoricalFocalCrossentropy CategoricalGeneralizedCrossEntropy CategoricalHinge Circle
    CosineSimilarity Dice Hinge Huber KLDivergence LogCosh MeanAbsoluteError
    MeanAbsolutePercentageError MeanSquaredError MeanSquaredLogarithmicError Poisson
    SparseCategoricalCrossentropy SquaredHinge Tversky binary_crossentropy
    binary_focal_crossentropy categorical_crossentropy categorical_focal_crossentropy
    categorical_generalized_cross_entropy categorical_hinge circle cosine_similarity dice hinge
    huber kl_divergence log_cosh mean_absolute_error mean_absolute_percentage_error
    mean_squared_error mean_squared_logarithmic_error poisson sparse_categorical_crossentropy
    squared_hinge tversky
    """
)
METRICS = names(
    """
    AUC Accuracy BinaryAccuracy BinaryCrossentropy BinaryIoU CategoricalAccuracy
    CategoricalCrossentropy CategoricalHinge ConcordanceCorrelation CosineSimilarity F1Score
    FBetaScore FalseNegatives FalsePositives Hinge IoU KLDivergence LogCoshError Mean
    MeanAbsoluteError MeanAbsolutePercentageError MeanIoU MeanMetricWrapper MeanSquaredError
    MeanSquaredLogarithmicError OneHotIoU OneHotMeanIoU PearsonCorrelation Poisson Precision
    PrecisionAtRecall R2Score Recall RecallAtPrecision RootMeanSquaredError
    SensitivityAtSpecificity SparseCategoricalAccuracy SparseCategoricalCrossentropy
    SparseTopKCategoricalAccuracy SpecificityAtSensitivity SquaredHinge Sum
    TopKCategoricalAccuracy TrueNegatives TruePositives binary_accuracy binary_crossentropy
    binary_focal_crossentropy categorical_accuracy categorical_crossentropy
    categorical_focal_crossentropy categorical_hinge concordance_correlation hinge huber
    kl_divergence log_cosh mean_absolute_error mean_absolute_percentage_error mean_squared_error
    mean_squared_logarithmic_error pearson_correlation poisson sparse_categorical_accuracy
    sparse_categorical_crossentropy sparse_top_k_categorical_accuracy squared_hinge
    top_k_categorical_accuracy
    """
)
OPTIMIZERS = names(
    """
    Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Lamb Lion Muon Nadam RMSprop SGD
    ScheduleFreeAdamW
    """
)


def is_compared(part: Any) -> bool:
    """Returns whether a class or a function of Keras is one of those that were compared."""
    return _key(part) in _COMPARED


def _key(part: Any) -> tuple[str, str]:
    """Returns the module and the name, which a class that is derived by `prepare` keeps."""
    return part.__module__, part.__name__


# An older Keras lacks some of the names.
_COMPARED = {
    _key(getattr(module, name))
    for module, parts in (
        (keras.layers, LAYERS),
        (keras.losses, LOSSES),
        (keras.metrics, METRICS),
        (keras.optimizers, OPTIMIZERS),
    )
    for name in parts
    if hasattr(module, name)
}
# The layers ConvLSTM make this cell, which has no public name. Its module is that of their base.
_COMPARED.add((keras.layers.ConvLSTM1D.__base__.__module__, "ConvLSTMCell"))
