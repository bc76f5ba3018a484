"""Data sets of images with binary masks: any two folders, the ISIC challenges, Kvasir-SEG."""
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from pathlib import Path

from mmengine.dist import get_dist_info
from mmengine.logging import print_log
from mmengine.utils import track_iter_progress
from mmseg.datasets import BaseSegDataset
from mmseg.registry import DATASETS
from PIL import Image

from kcla_mm.errors import DataError

from .transforms import read_binary_mask

IMAGES = '.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff'
ROTATED = 5, 6, 7, 8  # EXIF orientations that swap height and width


@DATASETS.register_module()
class BinaryLesionDataset(BaseSegDataset):
    """Images and the masks of their lesions, in two folders, matched by name.

    The files are read as they were downloaded. What is no image, hidden files and ``*_superpixels.png`` are passed
    over. All is checked when the data set is made: that each image has a mask and each mask an image, that all of them
    can be decoded and are of the same size, and that the masks are masks (see `LoadBinaryMask`, which has to be in the
    pipeline). In a distributed run each process checks its share.

    Args:
        data_root (str): The folder that the other paths are relative to. Defaults to '', the working directory.
        data_prefix (dict): The two folders. Defaults to ``dict(img_path='images', seg_map_path='masks')``.
        mask_suffix (str): What follows an image's name in that of its mask, such as '_segmentation', without the
            extension. Defaults to ''.
        ann_file (str): A list of the images to use, a name a line, with or without extension; by default, all.
        split (str, optional): 'train' or 'val': the part of these images that ``train_ratio`` gives. Defaults to None,
            all of them.
        train_ratio (float, optional): Share of the training part, between 0 and 1. Which images are in it depends only
            on their names and on ``seed``. Needs ``split``. Defaults to None.
        seed (int): Another seed, other parts. Defaults to 0.
        **kwargs: Further arguments of MMSegmentation's `BaseSegDataset`, such as ``pipeline``, ``metainfo`` (two
            classes, the background first) or ``indices``.

    Raises:
        DataError: If files are missing, broken or not what they should be. The message names them.
        ValueError: If an argument is out of its range.
    """
    METAINFO = dict(classes=('background', 'lesion'), palette=[[0, 0, 0], [255, 255, 255]])

    def __init__(self, data_root='', data_prefix=dict(img_path='images', seg_map_path='masks'), mask_suffix='',
                 ann_file='', split=None, train_ratio=None, seed=0, **kwargs):
        for name in ('img_suffix', 'seg_map_suffix', 'reduce_zero_label', 'backend_args'):
            if kwargs.get(name):
                raise ValueError(f'{type(self).__name__} has no argument {name}: images and masks are local files '
                                 'matched by name, whatever their extensions')
        if split not in ('train', 'val', None):
            raise ValueError(f"split must be 'train', 'val' or None, got {split!r}")
        if train_ratio is not None:
            if not isinstance(train_ratio, Real) or not 0 < train_ratio < 1:
                raise ValueError(f'train_ratio must be a number between 0 and 1, got {train_ratio!r}')
            if split is None:
                raise ValueError(f"train_ratio={train_ratio} needs split='train' or split='val'")
        elif split is not None and not ann_file:
            raise ValueError(f'split={split!r} needs train_ratio, such as 0.7')
        if ann_file and split is not None:
            raise ValueError(f'ann_file={ann_file!r} and split={split!r} both say which images to use: leave one out')
        if not isinstance(data_prefix, dict) or not {'img_path', 'seg_map_path'} <= set(data_prefix):
            raise ValueError(f'data_prefix must be a dict with img_path and seg_map_path, got {data_prefix!r}')
        if not isinstance(mask_suffix, str):
            raise ValueError(f"mask_suffix must be a string such as '_segmentation', got {mask_suffix!r}")
        if not isinstance(seed, int):
            raise ValueError(f'seed must be an integer, got {seed!r}')
        self.mask_suffix = mask_suffix
        self.split = split
        self.train_ratio = train_ratio
        self.seed = seed
        super().__init__(data_root=os.path.expanduser(data_root), data_prefix=data_prefix, ann_file=ann_file, **kwargs)

    @classmethod
    def get_label_map(cls, new_classes=None):
        """The labels stay: other classes are other names."""
        if new_classes is not None and len(new_classes) != 2:
            raise ValueError(f'metainfo must have two classes, the background first, got classes={new_classes}')

    def load_data_list(self):
        """Finds the images and their masks, and checks them.

        Returns:
            list[dict]: ``img_path``, ``seg_map_path`` and what else MMSegmentation's transforms expect, by name.
        """
        images = self._find(self.data_prefix['img_path'], '')
        masks = self._find(self.data_prefix['seg_map_path'], self.mask_suffix)
        if self.ann_file:
            names = self._listed(images, masks)
        else:
            names = sorted(images)
            self._match(images, masks, 'image', 'mask', 'seg_map_path')
            self._match(masks, images, 'mask', 'image', 'img_path')
        if self.train_ratio is not None:
            names = self._drawn(names)
        self._check([(images[name], masks[name]) for name in names])
        return [dict(img_path=str(images[name]), seg_map_path=str(masks[name]), label_map=None,
                     reduce_zero_label=False, seg_fields=[]) for name in names]

    def _find(self, folder, suffix):
        """The images in a folder, by their name without ``suffix``."""
        folder = Path(folder)
        if not folder.is_dir():
            raise DataError(f'{type(self).__name__}: the folder {folder.absolute()} does not exist')
        found = {}
        for path in sorted(folder.iterdir()):
            if (path.suffix.lower() not in IMAGES or path.name.startswith('.') or not path.stem.endswith(suffix)
                    or path.stem.endswith('_superpixels')):
                continue
            other = found.setdefault(path.stem[:len(path.stem) - len(suffix)], path)
            if other is not path:
                raise DataError(f'{other} and {path.name} have the same name: remove one')
        if not found:
            ending = f'*{suffix}' if suffix else '*'
            raise DataError(f'{type(self).__name__}: {folder} has no images ({ending} with {", ".join(IMAGES)})')
        return found

    def _match(self, files, others, kind, other, folder):
        single = [str(path) for name, path in files.items() if name not in others]
        if single:
            names = ', '.join(single[:3]) + (', ...' if len(single) > 3 else '')
            raise DataError(f'{type(self).__name__}: {len(single)} of {len(files)} {kind}s have no {other} in '
                            f'{self.data_prefix[folder]}: {names} (a mask has the name of its image followed by '
                            f'mask_suffix={self.mask_suffix!r})')

    def _listed(self, images, masks):
        path = Path(self.ann_file)
        if not path.is_file():
            raise DataError(f'{type(self).__name__}: the list of images {path} does not exist')
        lines = [line.strip() for line in path.read_text(encoding='utf-8-sig').splitlines()]
        names = [line[:-len(suffix)] if (suffix := Path(line).suffix).lower() in IMAGES else line
                 for line in lines if line]
        if not names:
            raise DataError(f'{type(self).__name__}: the list of images {path} is empty')
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise DataError(f'the list {path} names {twice[0]} more than once')
        for folder, found, kind in ((self.data_prefix['img_path'], images, 'image'),
                                    (self.data_prefix['seg_map_path'], masks, 'mask')):
            absent = [name for name in names if name not in found]
            if absent:
                raise DataError(f'{len(absent)} of the {len(names)} images in the list {path} have no {kind} in '
                                f'{folder}, such as {absent[0]}')
        return names

    def _drawn(self, names):
        drawn = sorted(names, key=lambda name: hashlib.sha256(f'{self.seed}/{name}'.encode()).digest())
        train = round(self.train_ratio * len(drawn))
        if not 0 < train < len(drawn):
            raise DataError(f'{type(self).__name__}: train_ratio={self.train_ratio} of {len(drawn)} images leaves one '
                            'part empty')
        return sorted(drawn[:train] if self.split == 'train' else drawn[train:])

    def _check(self, pairs):
        rank, processes = get_dist_info()
        print_log(f'{type(self).__name__}: checking {len(pairs)} images and masks', logger='current')
        with ThreadPoolExecutor() as pool:
            checks = pool.map(_check_pair, pairs[rank::processes])
            for _ in track_iter_progress((checks, len(pairs[rank::processes]))) if rank == 0 else checks:
                pass


def _check_pair(pair):
    image_path, mask_path = pair
    try:
        with Image.open(image_path) as image:
            width, height = image.size
            image.draft('L', (1, 1))  # JPEGs are decoded at an eighth of their size
            image.load()
            if image.format == 'TIFF':  # which Pillow rotates itself
                width, height = image.size
            if image.getexif().get(0x0112) in ROTATED:
                width, height = height, width
    except Exception as error:  # Pillow raises many kinds
        raise DataError(f'the image {image_path} cannot be decoded: {error}') from None
    mask = read_binary_mask(mask_path)
    if mask.shape != (height, width):
        raise DataError(f'the mask {mask_path} has {mask.shape[1]} x {mask.shape[0]} pixels, but its image '
                        f'{image_path} {width} x {height}')


@DATASETS.register_module()
class ISICDataset(BinaryLesionDataset):
    """The lesion segmentation data of the ISIC challenges of 2017 (part 1) and 2018 (task 1), as downloaded.

    ``data_root`` holds the challenge's own folders:

    ====  =====  ===============================  =====================================
    year  part   images                           masks
    ====  =====  ===============================  =====================================
    2017  train  ISIC-2017_Training_Data          ISIC-2017_Training_Part1_GroundTruth
    2017  val    ISIC-2017_Validation_Data        ISIC-2017_Validation_Part1_GroundTruth
    2017  test   ISIC-2017_Test_v2_Data           ISIC-2017_Test_v2_Part1_GroundTruth
    2018  train  ISIC2018_Task1-2_Training_Input  ISIC2018_Task1_Training_GroundTruth
    2018  val    ISIC2018_Task1-2_Validation_Input  ISIC2018_Task1_Validation_GroundTruth
    2018  test   ISIC2018_Task1-2_Test_Input      ISIC2018_Task1_Test_GroundTruth
    ====  =====  ===============================  =====================================

    Sources: arXiv 1710.05006 (2017), arXiv 1902.03368 (2018).

    Args:
        year (int): 2017 or 2018. Defaults to 2018.
        part (str): 'train', 'val' or 'test', the official parts. Defaults to 'train'.
        **kwargs: Arguments of `BinaryLesionDataset` other than ``data_prefix`` and ``mask_suffix``: the official part
            can be narrowed down with ``ann_file``, or with ``split`` and ``train_ratio``.

    Raises:
        ValueError: If ``year`` or ``part`` is unknown.
        DataError: See `BinaryLesionDataset`.
    """
    FOLDERS = {
        2017: ('ISIC-2017_{}_Data', 'ISIC-2017_{}_Part1_GroundTruth',
               dict(train='Training', val='Validation', test='Test_v2')),
        2018: ('ISIC2018_Task1-2_{}_Input', 'ISIC2018_Task1_{}_GroundTruth',
               dict(train='Training', val='Validation', test='Test')),
    }

    def __init__(self, year=2018, part='train', **kwargs):
        if year not in self.FOLDERS:
            raise ValueError(f'year must be one of {sorted(self.FOLDERS)}, got {year!r}')
        images, masks, parts = self.FOLDERS[year]
        if part not in parts:
            raise ValueError(f'part must be one of {sorted(parts)}, got {part!r}')
        super().__init__(data_prefix=dict(img_path=images.format(parts[part]), seg_map_path=masks.format(parts[part])),
                         mask_suffix='_segmentation', **kwargs)


@DATASETS.register_module()
class KvasirSEGDataset(BinaryLesionDataset):
    """Kvasir-SEG, 1000 images of polyps, as downloaded: ``images/`` and ``masks/`` in ``data_root``.

    Source: arXiv 1911.07069. There is no official split.

    Args:
        split (str, optional): 'train' or 'val': without ``train_ratio`` and ``ann_file``, the 700 and 300 images of the
            KCLA paper's code (arXiv 2606.28405), whose list this package has. Defaults to None, all images.
        **kwargs: Arguments of `BinaryLesionDataset`.

    Raises:
        DataError: See `BinaryLesionDataset`.
    """
    METAINFO = dict(classes=('background', 'polyp'), palette=[[0, 0, 0], [255, 255, 255]])

    def __init__(self, split=None, ann_file='', train_ratio=None, **kwargs):
        if split in ('train', 'val') and not ann_file and train_ratio is None:
            ann_file = str(Path(__file__).parent.absolute() / 'kvasir_seg' / f'{split}.txt')
            split = None
        super().__init__(split=split, ann_file=ann_file, train_ratio=train_ratio, **kwargs)
