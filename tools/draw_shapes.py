"""Draws a small data set in COCO format: bright circles, squares and triangles on noisy backgrounds.

    python tools/draw_shapes.py data/shapes

It has boxes, masks of the visible parts, crowd regions, and objects in each of COCO's three ranges of area. The same
arguments give the same annotations on any machine.
"""
import json

import cv2
import drawing
import numpy as np
from pycocotools import mask as coco_mask

CATEGORIES = ('circle', 'square', 'triangle')
CROWD_SHARE = 0.2  # of the images have a crowd
MAX_OVERLAP = 0.2  # of the smaller of two objects
MIN_CONTRAST = 200  # by which an object is brighter than the mean background, all channels together
TURN = 0.2  # radians, either way


def draw_background(rng, size):
    """A slope from one dark colour to another with noise on it: (size, size, 3) float."""
    start, end = rng.uniform(10, 110, (2, 3))
    direction = rng.normal(size=2)
    slope = np.mgrid[:size, :size].T @ direction
    slope = (slope - slope.min()) / np.ptp(slope)
    return start + slope[..., None] * (end - start) + rng.normal(0, rng.uniform(4, 16), (size, size, 3))


def shape_mask(rng, size, category, root_area, centre):
    """The mask, (size, size) bool, of a slightly turned shape whose area is about ``root_area`` squared.

    Worked out in whole numbers: OpenCV fills a polygon differently from one release to the next.
    """
    rows, columns = np.mgrid[:size, :size]
    if category == 'circle':
        x, y, radius = np.rint([*centre, root_area / np.sqrt(np.pi)]).astype(int)
        return (columns - x)**2 + (rows - y)**2 <= radius**2
    corners, first = {'square': (4, np.pi / 4), 'triangle': (3, -np.pi / 2)}[category]
    angles = first + rng.uniform(-TURN, TURN) + 2 * np.pi / corners * np.arange(corners)
    radius = root_area / np.sqrt(corners / 2 * np.sin(2 * np.pi / corners))
    points = np.rint(np.asarray(centre) + radius * np.stack([np.cos(angles), np.sin(angles)], 1)).astype(int)
    inside = np.ones((size, size), bool)
    for (x, y), (next_x, next_y) in zip(points, np.roll(points, -1, 0)):
        inside &= (next_x - x) * (rows - y) - (next_y - y) * (columns - x) >= 0
    return inside


def draw_image(rng, size):
    """Draws one image.

    Args:
        rng (numpy.random.Generator): Source of all that is random.
        size (int): Height and width in pixels.

    Returns:
        tuple: The image, (size, size, 3) uint8, and its objects, a list of category index, mask of the visible part,
        (size, size) bool, and whether it is a crowd.
    """
    image = draw_background(rng, size)
    background = image.mean((0, 1))
    objects = []

    def add(category, mask, crowd):
        if any((mask & other).sum() > MAX_OVERLAP * min(mask.sum(), other.sum()) for _, other, _ in objects):
            return
        colour = background
        while (colour - background).sum() < MIN_CONTRAST:
            colour = rng.uniform(0, 255, 3)
        image[mask] = colour + rng.normal(0, 6, (mask.sum(), 3))
        for _, other, _ in objects:
            other &= ~mask
        objects.append((category, mask, crowd))

    if rng.random() < CROWD_SHARE:
        category = rng.integers(len(CATEGORIES))
        middle = rng.uniform(0.2 * size, 0.8 * size, 2)
        masks = [shape_mask(rng, size, CATEGORIES[category], rng.uniform(7, 11), middle + offset)
                 for offset in rng.uniform(-0.15 * size, 0.15 * size, (12, 2))]
        add(category, np.any(masks, axis=0), True)
    for _ in range(rng.integers(3, 9)):
        category = rng.integers(len(CATEGORIES))
        root_area = np.exp(rng.uniform(np.log(16), np.log(0.55 * size)))
        margin = 0.5 * root_area
        centre = rng.uniform(margin, size - margin, 2)
        add(category, shape_mask(rng, size, CATEGORIES[category], root_area, centre), False)
    return image.clip(0, 255).astype(np.uint8), objects


def annotation(category, mask, crowd):
    """The COCO annotation of a mask, but for its ids."""
    rle = coco_mask.encode(np.asfortranarray(mask, np.uint8))
    return dict(
        category_id=int(category) + 1,
        iscrowd=int(crowd),
        area=int(mask.sum()),
        bbox=[int(v) for v in coco_mask.toBbox(rle)],
        segmentation=dict(size=rle['size'], counts=rle['counts'].decode()))


def draw_split(folder, split, info):
    """Writes the images of a split to ``folder/split`` and ``folder/annotations/instances_{split}.json``."""
    (folder / split).mkdir()
    size = info['size']
    images, annotations = [], []
    for image_id in range(1, info[split] + 1):
        image, objects = draw_image(drawing.image_rng(info, split, image_id), size)
        name = f'{image_id:06d}.jpg'
        drawing.write_image(folder / split / name, image, cv2.IMWRITE_JPEG_QUALITY, 95)
        images.append(dict(id=image_id, file_name=name, height=size, width=size))
        for drawn in objects:
            annotations.append(dict(id=len(annotations) + 1, image_id=image_id, **annotation(*drawn)))
    categories = [dict(id=i, name=name) for i, name in enumerate(CATEGORIES, 1)]
    (folder / 'annotations' / f'instances_{split}.json').write_text(
        json.dumps(dict(info=info, images=images, annotations=annotations, categories=categories)))


def draw_shapes(folder, info):
    """Draws the data set that ``info`` describes into an empty folder."""
    (folder / 'annotations').mkdir()
    draw_split(folder, 'train', info)
    draw_split(folder, 'val', info)


def is_drawn(folder, info):
    """Whether ``folder`` holds all of the data set that ``info`` describes."""
    try:
        for split in ('train', 'val'):
            data = json.loads((folder / 'annotations' / f'instances_{split}.json').read_text())
            if data['info'] != info or not all((folder / split / i['file_name']).is_file() for i in data['images']):
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


if __name__ == '__main__':
    drawing.main(__doc__, 'shapes drawn by tools/draw_shapes.py', draw_shapes, is_drawn, train=300, val=50, size=192)
