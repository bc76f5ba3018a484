"""Pictures of where a lesion was found, and where it is."""
import cv2
import numpy as np
from mmseg.registry import VISUALIZERS
from mmseg.visualization import SegLocalVisualizer


@VISUALIZERS.register_module()
class LesionVisualizer(SegLocalVisualizer):
    """placeholder"""
