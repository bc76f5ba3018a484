"""Segmentation of lesions and polyps with MMSegmentation: UNet decoder, loss, data sets and scores."""
from .datasets import BinaryLesionDataset, ISICDataset, KvasirSEGDataset
from .losses import BCEDiceLoss
from .metrics import LesionMetric
from .transforms import LoadBinaryMask
from .unet_head import UNetHead
from .visualization import LesionVisualizer

__all__ = ['BCEDiceLoss', 'BinaryLesionDataset', 'ISICDataset', 'KvasirSEGDataset', 'LesionMetric', 'LesionVisualizer',
           'LoadBinaryMask', 'UNetHead']
