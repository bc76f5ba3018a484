"""Reads the masks of binary segmentation data sets, however they were saved."""
import numpy as np
from mmcv.transforms import BaseTransform
from mmseg.registry import TRANSFORMS
from PIL import Image, ImageOps

from kcla_mm.errors import DataError

GREY = 32, 223  # levels that belong neither to the background nor to the lesion
MAX_GREY_SHARE = 0.1  # of the pixels may have them: edges that a resize has smoothed


def read_binary_mask(path):
    """Reads a mask in which black is the background and what is bright, or anything else than black, is the lesion.

    JPEGs with grey noise, RGB masks, 0/255, 0/1, boolean, palette and 16-bit images are all understood.

    Args:
        path (str): The file.

    Returns:
        ndarray: The mask, of shape (H, W), type uint8 and values 0 and 1.

    Raises:
        DataError: If the file can't be decoded, is not a mask but an image of many grey levels, or has labels of more
            than two classes. The message names the file and says what was found.
    """
    try:
        with Image.open(path) as image:
            is_jpeg = image.format == 'JPEG'
            image = ImageOps.exif_transpose(image)
            if image.mode in ('P', 'PA', 'CMYK', 'YCbCr'):
                image = image.convert('RGB')
            alpha = image.mode in ('LA', 'RGBA')
            levels = np.asarray(image)
    except Exception as error:  # Pillow raises many kinds
        raise DataError(f'the mask {path} cannot be decoded: {error}') from None
    if levels.ndim == 3:
        channels = np.ascontiguousarray(np.moveaxis(levels, 2, 0))
        if alpha:
            channels, opacity = channels[:-1], channels[-1]
            if not channels.any() and np.ptp(opacity):
                raise DataError(f'the mask {path} is black, with a shape in its alpha channel alone')
        levels = channels.max(0)
        if (levels - channels.min(0)).max() >= GREY[0]:
            if levels.min() >= GREY[0]:
                raise DataError(f'the mask {path} has colours, but no black background')
            colours = len(np.unique(sum(channel.astype(np.uint32) << 8 * i for i, channel in enumerate(channels))))
            if colours > 2 and not is_jpeg:
                raise DataError(f'the mask {path} has {colours} colours: it should have only black and one other '
                                'colour, or be black and white')
    found = np.flatnonzero(np.bincount(levels.ravel())) if levels.dtype == np.uint8 else np.unique(levels)
    if len(found) <= 2 and not is_jpeg and (len(found) == 1 or found[0] == 0):
        return (levels > 0).astype(np.uint8)
    values = _some(found)
    if found[-1] > 255:  # of 16 bits
        levels, found = levels // 257, found // 257
    three_labels = len(found) == 3 and found[1] <= GREY[1] and not is_jpeg
    if three_labels or 0 < found[-1] < 128:
        raise DataError(f'the mask {path} has the values {values}: it should have only 0 and one other value, or be '
                        'black and white')
    grey = ((levels >= GREY[0]) & (levels <= GREY[1])).mean()
    if grey > MAX_GREY_SHARE:
        raise DataError(f'{path} is not a mask: {grey:.0%} of its pixels are neither black nor white, but have values '
                        f'from {GREY[0]} to {GREY[1]}')
    return (levels >= 128).astype(np.uint8)


def _some(values):
    return ', '.join(map(str, values[:5])) + (', ...' if len(values) > 5 else '')


@TRANSFORMS.register_module()
class LoadBinaryMask(BaseTransform):
    """Loads the mask of an image as labels 0, background, and 1, lesion.

    In these data sets a mask that is read the usual way makes 255 the ignore index, and the IoU zero.

    Required keys: ``seg_map_path`` and ``seg_fields``. Without ``seg_map_path``, in inference, nothing is done. Added
    key: ``gt_seg_map``, (H, W) uint8. Place it behind the image's Resize in a test pipeline, to score at the image's
    own size.

    Raises:
        DataError: See :func:`read_binary_mask`.
    """

    def transform(self, results):
        if results.get('seg_map_path') is not None:
            results['gt_seg_map'] = read_binary_mask(results['seg_map_path'])
            results.setdefault('seg_fields', []).append('gt_seg_map')
        return results

    def __repr__(self):
        return f'{type(self).__name__}()'
