"""Image data, gated image networks and how they are trained."""

from unlazy.checks import explain_errors
from unlazy.data.images import Images
from unlazy.data.relabelling import Cut, Relabelling, cut_classes, random_splits, relabel
from unlazy.models.folding import fold_batch_norm, half_space_normals
from unlazy.models.image_net import GatedImageNet
from unlazy.models.spec import ImageSpec, conv_spec, resnet34_spec, resnet110_spec
from unlazy.training.images import ImageRecipe, train_images

__all__ = [
    "Cut",
    "GatedImageNet",
    "ImageRecipe",
    "ImageSpec",
    "Images",
    "Relabelling",
    "conv_spec",
    "cut_classes",
    "fold_batch_norm",
    "half_space_normals",
    "random_splits",
    "relabel",
    "resnet34_spec",
    "resnet110_spec",
    "train_images",
]

explain_errors(globals())
