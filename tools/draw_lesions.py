"""Draws a small data set of lesions for segmentation: a dark, irregular spot on skin in each image, and its mask.

    python tools/draw_lesions.py data/lesions

Many of the spots are faint or have a wide, soft edge; there are hairs, rulers, reflections, freckles, red patches and
dark corners too. It is read by `BinaryLesionDataset`: images/, masks/, and the lists train.txt and val.txt. The
same arguments give the same masks on any machine.
"""
import json

import cv2
import drawing
import numpy as np

SIDE = 96  # pixels for which lengths are given below; they grow with the image
MELANIN = (0.4, 0.7, 0.9)  # what a unit of it absorbs of red, green, blue: the natural logarithm
BLOOD = (0.08, 0.55, 0.45)
INK = (1.6, 1.6, 1.5)


def smooth_noise(rng, size, waves):
    """A field, (size, size), of mean 0 and standard deviation 1: cosines, the shortest of waves / 2 periods."""
    order = np.arange(waves)
    cosines = np.cos(np.pi / size * np.outer(np.arange(size) + 0.5, order))
    weights = rng.normal(size=(waves, waves)) / (1 + np.hypot(order, order[:, None]))
    weights[0, 0] = 0
    field = cosines @ weights @ cosines.T
    return field / field.std()


def turned_grid(rng, size, centre):
    """Coordinates, (size, size) each, along and across some direction, from a centre (x, y), in 96ths of the image."""
    rows, columns = np.mgrid[:size, :size] * (SIDE / size)
    angle = rng.uniform(0, 2 * np.pi)
    x, y = columns - centre[0], rows - centre[1]
    return x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)


def lesion_depth(rng, size):
    """How far each pixel, (size, size), is inside the outline of a lesion, negative outside, in 96ths of the image."""
    radius = np.exp(rng.uniform(np.log(9), np.log(30)))
    along, across = turned_grid(rng, size, rng.uniform(0.28 * SIDE, 0.72 * SIDE, 2))
    along = along * rng.uniform(0.65, 1)
    angle = np.arctan2(across, along)
    outline = 1 + sum(rng.normal(0, 0.2 / wave) * np.cos(wave * angle + rng.uniform(0, 2 * np.pi))
                      for wave in range(2, 8))
    return radius * np.maximum(outline, 0.5) - np.hypot(along, across) + 0.8 * smooth_noise(rng, size, 32)


def spot(rng, size, radius):
    """A round spot, (size, size), that fades from 1 to 0."""
    along, across = turned_grid(rng, size, rng.uniform(0, SIDE, 2))
    return np.exp(-(along**2 + (across * rng.uniform(1, 1.6))**2) / (2 * radius**2))


def line(rng, size, width, bend):
    """A hair across the image, (size, size), 1 on it and 0 beside it."""
    along, across = turned_grid(rng, size, rng.uniform(0, SIDE, 2))
    across = across - bend * along**2 / SIDE
    return np.clip(width / 2 + 0.5 - np.abs(across), 0, 1) * (np.abs(along) < rng.uniform(15, 80))


def ruler(rng, size):
    """A straight line with marks on one side, (size, size)."""
    along, across = turned_grid(rng, size, rng.uniform(0.1 * SIDE, 0.9 * SIDE, 2))
    marks = (along % 6 < 0.9) & (across > 0) & (across < np.where(along % 30 < 0.9, 8, 4))
    return np.clip(1 - np.abs(across), 0, 1) + marks


def draw_image(rng, size):
    """Draws one image.

    Args:
        rng (numpy.random.Generator): Source of all that is random.
        size (int): Height and width in pixels.

    Returns:
        tuple[ndarray]: The image, (size, size, 3) uint8 RGB, and the mask of its lesion, (size, size) bool.
    """
    skin = np.array([232, 190, 165]) + rng.normal(0, 9, 3)
    depth = lesion_depth(rng, size)
    cover = 1 / (1 + np.exp(-depth / np.exp(rng.uniform(np.log(0.4), np.log(3)))))  # 1 well inside, 0.5 on the outline
    strength = np.exp(rng.uniform(np.log(0.25), np.log(1.3)))
    melanin = strength * cover * np.clip(1 + 0.25 * smooth_noise(rng, size, 12), 0.3, None)
    melanin += rng.uniform(0, 0.5) + 0.06 * smooth_noise(rng, size, 4) + 0.025 * smooth_noise(rng, size, 48)
    for _ in range(rng.integers(0, 12)):  # freckles
        melanin += rng.uniform(0.1, 0.5) * spot(rng, size, rng.uniform(0.7, 1.8))
    blood = 0.05 * smooth_noise(rng, size, 6)
    if rng.random() < 0.4:
        blood += rng.uniform(0.2, 0.8) * spot(rng, size, rng.uniform(6, 16))
    ink = np.zeros((size, size))
    if rng.random() < 0.5:
        for _ in range(rng.integers(1, 8)):
            hair = line(rng, size, rng.uniform(0.4, 1.4), rng.normal(0, 0.4))
            ink = np.maximum(ink, rng.uniform(0.4, 0.9) * hair)
    if rng.random() < 0.15:
        ink = np.maximum(ink, rng.uniform(0.4, 0.9) * ruler(rng, size).clip(0, 1))
    absorbed = sum(np.multiply.outer(amount, kind)
                   for amount, kind in ((melanin, MELANIN), (blood, BLOOD), (ink, INK)))
    if rng.random() < 0.3:  # dark corners
        rows, columns = np.mgrid[:size, :size] / (size - 1) * 2 - 1
        absorbed += rng.uniform(0.5, 2.5) * np.clip(np.hypot(rows, columns) - 0.8, 0, None)[..., None]
    image = skin * np.exp(-absorbed)
    for _ in range(rng.integers(0, 5) if rng.random() < 0.4 else 0):  # reflections
        image += (250 - image) * (1.5 * spot(rng, size, rng.uniform(0.8, 2))).clip(0, 1)[..., None]
    image += rng.normal(0, rng.uniform(1, 5), (size, size, 3))
    return image.clip(0, 255).astype(np.uint8), depth > 0


def names(info, split):
    return [f'{split}_{number:04d}' for number in range(1, info[split] + 1)]


def draw_lesions(folder, info):
    """Draws the data set that ``info`` describes into an empty folder."""
    (folder / 'images').mkdir()
    (folder / 'masks').mkdir()
    for split in ('train', 'val'):
        for number, name in enumerate(names(info, split), 1):
            image, mask = draw_image(drawing.image_rng(info, split, number), info['size'])
            drawing.write_image(folder / 'images' / f'{name}.jpg', image[..., ::-1], cv2.IMWRITE_JPEG_QUALITY, 95)
            drawing.write_image(folder / 'masks' / f'{name}.png', mask * np.uint8(255))
        (folder / f'{split}.txt').write_text('\n'.join(names(info, split)) + '\n')
    (folder / 'info.json').write_text(json.dumps(info))


def is_drawn(folder, info):
    """Whether ``folder`` holds all of the data set that ``info`` describes."""
    try:
        return json.loads((folder / 'info.json').read_text()) == info and all(
            (folder / f'{split}.txt').read_text().split() == names(info, split)
            and all((folder / 'images' / f'{name}.jpg').is_file() and (folder / 'masks' / f'{name}.png').is_file()
                    for name in names(info, split))
            for split in ('train', 'val'))
    except (OSError, ValueError):
        return False


if __name__ == '__main__':
    drawing.main(__doc__, 'lesions drawn by tools/draw_lesions.py', draw_lesions, is_drawn, train=240, val=60, size=96)
