"""Masks, however they were saved, become 0 and 1."""
import io

import numpy as np
import pytest
from mmseg.registry import TRANSFORMS
from PIL import Image

from kcla_mm.errors import DataError
from kcla_mm.segmentation import LoadBinaryMask
from kcla_mm.segmentation.transforms import read_binary_mask

ROWS, COLUMNS = np.mgrid[:60, :80]
MASK = np.hypot(ROWS - 25, COLUMNS - 30) < 18
LEVELS = np.uint8(255 * MASK)


def load(path):
    return LoadBinaryMask()(dict(seg_map_path=str(path), seg_fields=[]))['gt_seg_map']


def palette(colours, labels=MASK):
    image = Image.frombytes('P', (80, 60), np.uint8(labels).tobytes())
    image.putpalette([value for colour in colours for value in colour])
    return image


def jpeg(image, quality=75):
    buffer = io.BytesIO()
    image.save(buffer, 'JPEG', quality=quality)
    return Image.open(buffer)


def coloured(colour):
    return Image.fromarray(MASK[..., None] * np.uint8(colour))


ALIKE = {
    '0 and 255': Image.fromarray(LEVELS),
    '0 and 1': Image.fromarray(np.uint8(MASK)),
    '0 and 128': Image.fromarray(LEVELS // 2 + MASK),
    '1 bit': Image.fromarray(LEVELS).convert('1'),
    'RGB': coloured([255, 255, 255]),
    'RGB, 0 and 1': coloured([1, 1, 1]),
    'red': coloured([255, 0, 0]),
    'RGBA': Image.merge('RGBA', [Image.fromarray(LEVELS)] * 3 + [Image.new('L', (80, 60), 255)]),
    'grey and alpha': Image.merge('LA', [Image.fromarray(LEVELS), Image.new('L', (80, 60), 255)]),
    '16 bits': Image.fromarray(np.uint16(65535) * MASK),
    '16 bits, 0 and 1': Image.fromarray(np.uint16(MASK)),
    '16 bits, noise': Image.fromarray(np.uint16(60000 * MASK + (ROWS + COLUMNS) % 1000)),
    'palette of black and white': palette([(0, 0, 0), (255, 255, 255)]),
    'palette of black and dark red, as of VOC': palette([(0, 0, 0), (128, 0, 0)]),
    'palette of 0 and 1': palette([(0, 0, 0), (1, 1, 1)]),
    'noise kept in a PNG': jpeg(Image.fromarray(LEVELS)).convert('L'),
    'coloured noise kept in a PNG': Image.fromarray(np.stack([jpeg(Image.fromarray(LEVELS), quality).convert('L')
                                                              for quality in (80, 90, 95)], 2)),
}


@pytest.mark.parametrize('image', ALIKE.values(), ids=ALIKE)
def test_all_kinds_of_png_are_read_alike(tmp_path, image):
    image.save(tmp_path / 'mask.png')
    mask = load(tmp_path / 'mask.png')
    assert mask.dtype == np.uint8
    np.testing.assert_array_equal(mask, MASK)


@pytest.mark.parametrize('image', [Image.fromarray(LEVELS), coloured([255, 255, 255])], ids=['L', 'RGB'])
@pytest.mark.parametrize('quality', [60, 95])
def test_the_noise_of_jpegs_is_no_lesion(tmp_path, image, quality):
    image.save(tmp_path / 'mask.jpg', quality=quality)
    assert len(np.unique(Image.open(tmp_path / 'mask.jpg'))) > 2
    np.testing.assert_array_equal(load(tmp_path / 'mask.jpg'), MASK)


def test_a_coloured_jpeg(tmp_path):
    coloured([255, 255, 0]).save(tmp_path / 'mask.jpg', quality=90, subsampling=0)
    assert np.mean(load(tmp_path / 'mask.jpg') != MASK) < 0.005


@pytest.mark.parametrize('filter', [Image.BILINEAR, Image.BOX])
def test_edges_that_a_resize_has_smoothed(tmp_path, filter):
    Image.fromarray(LEVELS).resize((40, 30), filter).save(tmp_path / 'mask.png')
    share = MASK.reshape(30, 2, 40, 2).mean((1, 3))
    mask = load(tmp_path / 'mask.png')
    np.testing.assert_array_equal(mask[share == 0], 0)
    np.testing.assert_array_equal(mask[share == 1], 1)


@pytest.mark.parametrize('value', [0, 1, 255])
@pytest.mark.parametrize('extension', ['png', 'bmp'])
def test_no_lesion_and_nothing_but_lesion(tmp_path, extension, value):
    Image.new('L', (8, 8), value).save(tmp_path / f'mask.{extension}')
    np.testing.assert_array_equal(load(tmp_path / f'mask.{extension}'), np.full((8, 8), value > 0))


def test_all_black_and_all_white_jpegs(tmp_path):
    for value in (0, 255):
        Image.new('L', (8, 8), value).save(tmp_path / 'mask.jpg')
        np.testing.assert_array_equal(load(tmp_path / 'mask.jpg'), np.full((8, 8), value > 0))


def classes(*values):
    """Two small areas of other values than the rest."""
    image = np.full((60, 80, *np.shape(values[0])), values[0], np.asarray(values).dtype)
    image[5:8, 5:8], image[20:23, 20:23] = values[1:]
    return image


def drawn(values, dtype=np.uint8):
    return Image.fromarray(classes(*dtype(values)))


NO_MASKS = {
    'labels 0, 1, 2': (drawn([0, 1, 2]), 'has the values 0, 1, 2: it should have only 0 and one other'),
    'labels 1, 2': (drawn([1, 2, 2]), 'has the values 1, 2: it should have only 0 and one other'),
    'ignored 255': (drawn([0, 1, 255]), 'has the values 0, 1, 255: it should have only 0 and one other'),
    'three greys': (drawn([0, 128, 255]), 'has the values 0, 128, 255: it should have only 0 and one'),
    '16-bit labels': (drawn([0, 300, 600], np.uint16), 'has the values 0, 300, 600: it should have only 0 and one'),
    'many labels': (Image.fromarray(np.uint8(ROWS)), 'has the values 0, 1, 2, 3, 4, ...: it should have only 0 and'),
    'three colours': (drawn([[0, 0, 0], [255, 0, 0], [0, 255, 0]]), 'has 3 colours: it should have only'),
    'palette of three': (palette([(0, 0, 0), (128, 0, 0), (0, 128, 0)], classes(0, 1, 2)),
                         'has 3 colours: it should have only black and one other colour'),
    'no black': (drawn([[255, 255, 255], [255, 0, 0], [255, 0, 0]]), 'has colours, but no black'),
    'a ramp': (Image.fromarray(np.uint8(255 * COLUMNS / 79)), '.*is not a mask: 7.% of its pixels are neither black'),
}


@pytest.mark.parametrize('image, message', NO_MASKS.values(), ids=NO_MASKS)
def test_what_is_no_binary_mask_is_an_error_that_says_what_it_has(tmp_path, image, message):
    image.save(tmp_path / 'b.png')
    with pytest.raises(DataError, match=f'b.png {message}'):
        load(tmp_path / 'b.png')


def test_a_photo_is_no_mask(tmp_path):
    photo = np.stack([COLUMNS * 2 + 40, ROWS * 3 + 30, (COLUMNS + ROWS) % 200], 2)
    Image.fromarray(np.uint8(photo)).save(tmp_path / 'b.jpg')
    with pytest.raises(DataError, match='b.jpg (is not a mask|has colours, but no black background)'):
        load(tmp_path / 'b.jpg')


@pytest.mark.parametrize('extension', ['png', 'jpg', 'bmp', 'tif'])
def test_a_truncated_file(tmp_path, extension):
    path = tmp_path / f'mask.{extension}'
    Image.fromarray(LEVELS).save(path)
    path.write_bytes(path.read_bytes()[:path.stat().st_size * 2 // 3])
    with pytest.raises(DataError, match=f'mask.{extension} cannot be decoded'):
        load(path)


def test_it_does_what_later_transforms_expect(tmp_path):
    Image.fromarray(LEVELS).save(tmp_path / 'mask.png')
    transform = TRANSFORMS.build(dict(type='LoadBinaryMask'))
    assert isinstance(transform, LoadBinaryMask) and repr(transform) == 'LoadBinaryMask()'
    assert transform(dict(seg_map_path=str(tmp_path / 'mask.png'), seg_fields=[]))['seg_fields'] == ['gt_seg_map']
    assert transform(dict(seg_map_path=str(tmp_path / 'mask.png')))['seg_fields'] == ['gt_seg_map']
    assert transform(dict(img_path='x.jpg')) == dict(img_path='x.jpg')  # in inference there is no mask


def test_a_mask_in_the_alpha_channel_alone(tmp_path):
    alpha = np.zeros((6, 8), np.uint8)
    alpha[2:4, 3:6] = 255
    Image.fromarray(np.dstack([np.zeros((6, 8, 3), np.uint8), alpha])).save(tmp_path / 'mask.png')
    with pytest.raises(DataError, match='mask.png is black, with a shape in its alpha channel alone'):
        read_binary_mask(tmp_path / 'mask.png')
