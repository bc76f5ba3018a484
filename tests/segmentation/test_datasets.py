"""Data sets of images and masks in folders, as they are downloaded."""
import gc
from pathlib import Path

import cv2
import numpy as np
import pytest
from mmengine.registry import DefaultScope
from mmseg.datasets import transforms  # noqa: F401, registers LoadImageFromFile for mmseg
from mmseg.registry import DATASETS
from PIL import Image

import kcla_mm
from kcla_mm.errors import DataError
from kcla_mm.segmentation import BinaryLesionDataset, ISICDataset, KvasirSEGDataset, datasets

LOAD = [dict(type='LoadImageFromFile'), dict(type='LoadBinaryMask')]
LISTS = Path(datasets.__file__).parent / 'kvasir_seg'


@pytest.fixture(scope='module', autouse=True)
def quick_garbage_collection():
    """A data set of MMEngine collects garbage when it is made, among all objects of the frameworks."""
    gc.freeze()
    yield
    gc.unfreeze()


def picture(height=24, width=32):
    """Grey, with a bright lesion at the top left that reaches over a quarter of the width and half of the height."""
    image = np.full((height, width, 3), 60, np.uint8)
    image[:height // 2, :width // 4] = 220
    return image


def write(path, pixels, **kwargs):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **kwargs)


def write_pair(root, name, mask_suffix='', images='images', masks='masks'):
    write(root / images / f'{name}.jpg', picture(), quality=95)
    write(root / masks / f'{name}{mask_suffix}.png', np.uint8(255 * (picture()[..., 0] > 128)))


@pytest.fixture
def folder(tmp_path):
    """A data set of three pairs."""
    for name in 'abc':
        write_pair(tmp_path, name)
    return tmp_path


def names(dataset):
    return [Path(sample['img_path']).stem for sample in map(dataset.get_data_info, range(len(dataset)))]


def loaded(dataset, index=0):
    """The image and the mask that the pipeline gives."""
    with DefaultScope.overwrite_default_scope('mmseg'):
        results = type(dataset)(data_root=dataset.data_root, pipeline=LOAD)[index]
    return results['img'], results['gt_seg_map']


def test_images_and_masks_are_matched_by_name(folder):
    dataset = BinaryLesionDataset(data_root=str(folder))
    for sample, name in zip(map(dataset.get_data_info, range(3)), 'abc'):
        assert sample['img_path'] == str(folder / f'images/{name}.jpg')
        assert sample['seg_map_path'] == str(folder / f'masks/{name}.png')
    assert len(dataset) == 3
    assert dataset.metainfo['classes'] == ('background', 'lesion')


def test_any_two_folders_and_extensions_do(tmp_path, monkeypatch):
    write(tmp_path / 'photos/one.two.PNG', picture())
    write(tmp_path / 'photos/three.Jpeg', picture(), format='JPEG')
    write(tmp_path / 'truth/one.two_lesion.BMP', np.uint8(255 * (picture()[..., 0] > 128)))
    write(tmp_path / 'truth/three_lesion.TIF', np.uint8(255 * (picture()[..., 0] > 128)), format='TIFF')
    monkeypatch.chdir(tmp_path)
    dataset = BinaryLesionDataset(data_prefix=dict(img_path='photos', seg_map_path=str(tmp_path / 'truth')),
                                  mask_suffix='_lesion')
    assert names(dataset) == ['one.two', 'three']


def test_what_is_no_image_is_passed_over(folder):
    for name in ('images/ATTRIBUTION.txt', 'images/LICENSE.txt', 'images/a.json', 'masks/.DS_Store', 'images/._a.jpg',
                 'images/.hidden.png', 'images/a_superpixels.png', 'masks/Thumbs.db', 'masks/d_superpixels.png'):
        (folder / name).write_text('no image')
    assert names(BinaryLesionDataset(data_root=str(folder))) == ['a', 'b', 'c']


def test_the_registry_builds_it(folder):
    dataset = DATASETS.build(dict(type='BinaryLesionDataset', data_root=str(folder), indices=2))
    assert isinstance(dataset, BinaryLesionDataset) and names(dataset) == ['a', 'b']


def test_other_names_for_the_classes_leave_the_labels(folder):
    metainfo = dict(classes=('skin', 'melanoma'))
    with DefaultScope.overwrite_default_scope('mmseg'):
        dataset = BinaryLesionDataset(data_root=str(folder), metainfo=metainfo, pipeline=LOAD)
        assert dataset.metainfo['classes'] == ('skin', 'melanoma')
        assert np.unique(dataset[0]['gt_seg_map']).tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"two classes, the background first, got classes=\('x', 'y', 'z'\)"):
        BinaryLesionDataset(data_root=str(folder), metainfo=dict(classes=('x', 'y', 'z')))


# Lists and splits

@pytest.mark.parametrize('lines', ['c\na\n', '\ufeffc.jpg\r\n\r\n  a.jpg  ', 'c.PNG\na'])
def test_a_list_says_which_images_in_its_order(folder, lines):
    (folder / 'list.txt').write_text(lines, encoding='utf-8')
    assert names(BinaryLesionDataset(data_root=str(folder), ann_file='list.txt')) == ['c', 'a']
    assert names(BinaryLesionDataset(data_root=str(folder), ann_file=str(folder / 'list.txt'))) == ['c', 'a']


def test_a_list_needs_only_the_pairs_that_it_names(folder):
    (folder / 'masks/b.png').unlink()
    (folder / 'list.txt').write_text('a\nc')
    assert names(BinaryLesionDataset(data_root=str(folder), ann_file='list.txt')) == ['a', 'c']


@pytest.mark.parametrize('lines, message', [
    ('', 'list of images .*list.txt is empty'),
    ('a\nb\na.jpg', 'list.txt names a more than once'),
    ('a\nx\ny', '2 of the 3 images in the list .*list.txt have no image in .*images, such as x'),
    (None, 'list of images .*list.txt does not exist'),
])
def test_a_list_that_does_not_fit(folder, lines, message):
    if lines is not None:
        (folder / 'list.txt').write_text(lines)
    with pytest.raises(DataError, match=message):
        BinaryLesionDataset(data_root=str(folder), ann_file='list.txt')


@pytest.fixture
def unchecked(monkeypatch):
    """Data sets are made without a look into the files."""
    monkeypatch.setattr(datasets, '_check_pair', lambda pair: None)


def touch(root, stems, images='images', masks='masks', suffix=''):
    for path, extension in ((root / images, 'jpg'), (root / masks, 'png')):
        path.mkdir(parents=True, exist_ok=True)
        for stem in stems:
            (path / f'{stem}{suffix if extension == "png" else ""}.{extension}').touch()


def test_a_ratio_draws_the_same_images_on_every_machine(tmp_path, unchecked, monkeypatch):
    stems = [f'lesion{number}' for number in range(10)]
    touch(tmp_path, stems)

    def drawn(split, **kwargs):
        return names(BinaryLesionDataset(data_root=str(tmp_path), split=split, train_ratio=0.7, **kwargs))
    first, second = drawn('train'), drawn('val')
    assert first == ['lesion1', 'lesion2', 'lesion3', 'lesion4', 'lesion5', 'lesion6', 'lesion7']
    assert second == ['lesion0', 'lesion8', 'lesion9']
    assert drawn('val', seed=1) == ['lesion1', 'lesion3', 'lesion8']

    listing = Path.iterdir
    monkeypatch.setattr(Path, 'iterdir', lambda path: reversed(sorted(listing(path))))
    assert drawn('train') == first and drawn('val') == second


@pytest.mark.parametrize('ratio', [0.1, 0.9])
def test_no_part_of_a_split_is_empty(folder, ratio):
    with pytest.raises(DataError, match=f'train_ratio={ratio} of 3 images leaves one part empty'):
        BinaryLesionDataset(data_root=str(folder), split='val', train_ratio=ratio)


# Mistakes in arguments

@pytest.mark.parametrize('arguments, message', [
    (dict(split='test'), "split must be 'train', 'val' or None, got 'test'"),
    (dict(split='train'), "split='train' needs train_ratio"),
    (dict(train_ratio=0.7), "train_ratio=0.7 needs split='train' or split='val'"),
    (dict(split='train', train_ratio=1.5), 'train_ratio must be a number between 0 and 1, got 1.5'),
    (dict(split='train', train_ratio='0.7'), "train_ratio must be a number between 0 and 1, got '0.7'"),
    (dict(split='train', ann_file='x.txt'), "ann_file='x.txt' and split='train' both say"),
    (dict(split='train', ann_file='x.txt', train_ratio=0.7), "ann_file='x.txt' and split='train' both say"),
    (dict(split='train', train_ratio=0.7, seed='x'), "seed must be an integer, got 'x'"),
    (dict(mask_suffix=None), "mask_suffix must be a string .*, got None"),
    (dict(data_prefix=dict(img_path='images')), r"data_prefix must .* img_path and seg_map_path, got {'img_path'"),
    (dict(data_prefix='images'), "data_prefix must be a dict .*, got 'images'"),
    (dict(img_suffix='.png'), 'BinaryLesionDataset has no argument img_suffix: .* matched by name'),
    (dict(reduce_zero_label=True), 'BinaryLesionDataset has no argument reduce_zero_label'),
])
def test_wrong_arguments(folder, arguments, message):
    with pytest.raises(ValueError, match=message):
        BinaryLesionDataset(data_root=str(folder), **arguments)


@pytest.mark.parametrize('arguments, message', [
    (dict(year=2016), r'year must be one of \[2017, 2018\], got 2016'),
    (dict(year='2018'), r"year must be one of \[2017, 2018\], got '2018'"),
    (dict(part='training'), r"part must be one of \['test', 'train', 'val'\], got 'training'"),
])
def test_wrong_arguments_for_isic(arguments, message):
    with pytest.raises(ValueError, match=message):
        ISICDataset(**arguments)


# Mistakes in files. Each is found when the data set is made.

def remove(path):
    path.unlink()


def truncate(path):
    path.write_bytes(path.read_bytes()[:path.stat().st_size * 2 // 3])


def empty(path):
    path.write_bytes(b'')


def be_text(path):
    path.write_text('404: Not Found')


def be_smaller(path):
    write(path, np.uint8(255 * (picture(24, 31)[..., 0] > 128)))


def be_a_photo(path):
    write(path, np.random.default_rng(0).integers(0, 256, (24, 32), dtype=np.uint8))


def have_three_classes(path):
    write(path, np.uint8(np.arange(24 * 32).reshape(24, 32) % 3))


@pytest.mark.parametrize('spoil, name, message', [
    (remove, 'masks/b.png', r"1 of 3 images have no mask in .*masks: .*images/b.jpg .*mask_suffix=''"),
    (remove, 'images/b.jpg', '1 of 3 masks have no image in .*images: .*masks/b.png'),
    (truncate, 'masks/b.png', 'mask .*masks/b.png cannot be decoded'),
    (empty, 'masks/b.png', 'mask .*masks/b.png cannot be decoded'),
    (be_text, 'masks/b.png', 'mask .*masks/b.png cannot be decoded'),
    (truncate, 'images/b.jpg', 'image .*images/b.jpg cannot be decoded'),
    (empty, 'images/b.jpg', 'image .*images/b.jpg cannot be decoded'),
    (be_text, 'images/b.jpg', 'image .*images/b.jpg cannot be decoded'),
    (be_smaller, 'masks/b.png', 'mask .*masks/b.png has 31 x 24 pixels, but its image .*images/b.jpg 32 x 24'),
    (be_a_photo, 'masks/b.png', 'masks/b.png is not a mask: [0-9]+% of its pixels are neither black nor white'),
    (have_three_classes, 'masks/b.png', 'mask .*masks/b.png has the values 0, 1, 2: it should have only 0 and one'),
], ids=lambda value: getattr(value, '__name__', None))
def test_spoilt_files_are_named(folder, spoil, name, message):
    spoil(folder / name)
    with pytest.raises(DataError, match=message):
        BinaryLesionDataset(data_root=str(folder))


def test_an_empty_or_missing_folder(folder):
    for path in (folder / 'masks').iterdir():
        path.rename(path.with_suffix('.txt'))
    with pytest.raises(DataError, match=r'masks has no images \(\* with .jpg, '):
        BinaryLesionDataset(data_root=str(folder))
    (folder / 'masks').rename(folder / 'Masks')
    with pytest.raises(DataError, match='the folder .*masks does not exist'):
        BinaryLesionDataset(data_root=str(folder))


def test_two_images_of_one_name(folder):
    write(folder / 'images/b.png', picture())
    with pytest.raises(DataError, match='images/b.jpg and b.png have the same name'):
        BinaryLesionDataset(data_root=str(folder))


def test_many_missing_masks_are_counted_and_a_few_named(tmp_path):
    touch(tmp_path, [f'{number:03}' for number in range(20)], masks='other')
    touch(tmp_path, ['000'], images='x')
    with pytest.raises(DataError) as error:
        BinaryLesionDataset(data_root=str(tmp_path))
    assert '19 of 20 images' in str(error.value) and '003.jpg, ...' in str(error.value)
    assert len(str(error.value)) < 500 + 3 * len(str(tmp_path))


# Files from elsewhere: the mask that is loaded is where the bright lesion of the image is

def agree(image, mask):
    return image.shape == (*mask.shape, 3) and (np.mean((image[..., 0] > 128) != mask) < 0.01)


def test_a_16_bit_png(tmp_path):
    path = tmp_path / 'images/a.png'
    path.parent.mkdir()
    cv2.imwrite(str(path), np.uint16(257) * picture())
    write(tmp_path / 'masks/a.png', np.uint8(picture()[..., 0] > 128))
    image, mask = loaded(BinaryLesionDataset(data_root=str(tmp_path)))
    assert agree(image, mask)


@pytest.mark.parametrize('extension, orientation', [('jpg', 3), ('jpg', 6), ('jpg', 8), ('png', 6), ('tif', 6)])
def test_a_photo_that_its_exif_data_rotate(tmp_path, extension, orientation):
    path = tmp_path / f'images/a.{extension}'
    exif = Image.Exif()
    exif[0x0112] = orientation
    write(path, picture(), exif=exif)
    upright = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)
    assert upright.shape[:2] == ((24, 32) if orientation < 5 else (32, 24))
    write(tmp_path / 'masks/a.png', np.uint8(upright[..., 0] > 128))
    assert agree(*loaded(BinaryLesionDataset(data_root=str(tmp_path))))

    write(tmp_path / 'masks/a.png', np.uint8(picture()[..., 0] > 128), exif=exif)
    assert agree(*loaded(BinaryLesionDataset(data_root=str(tmp_path))))


def test_an_unrotated_mask_of_a_rotated_photo(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    write(tmp_path / 'images/a.jpg', picture(), exif=exif)
    write(tmp_path / 'masks/a.png', np.uint8(picture()[..., 0] > 128))
    with pytest.raises(DataError, match='masks/a.png has 32 x 24 pixels, but its image .*images/a.jpg 24 x 32'):
        BinaryLesionDataset(data_root=str(tmp_path))


@pytest.mark.parametrize('extension, kwargs', [
    ('JPG', dict(format='JPEG', progressive=True)), ('TIFF', dict(format='TIFF', compression='tiff_lzw')),
    ('bmp', {}), ('JPEG', dict(format='PNG'))])
def test_extensions_say_nothing_about_the_format(tmp_path, extension, kwargs):
    write(tmp_path / f'images/a.{extension}', picture(), **kwargs)
    write(tmp_path / 'masks/a.PNG', np.uint8(picture()[..., 0] > 128), format='PNG')
    assert agree(*loaded(BinaryLesionDataset(data_root=str(tmp_path))))


def test_a_grey_photo(tmp_path):
    write(tmp_path / 'images/a.png', picture()[..., 0])
    write(tmp_path / 'masks/a.png', np.uint8(picture()[..., 0] > 128))
    assert agree(*loaded(BinaryLesionDataset(data_root=str(tmp_path))))


# ISIC and Kvasir-SEG

@pytest.mark.parametrize('year, part, images, masks', [
    (2017, 'train', 'ISIC-2017_Training_Data', 'ISIC-2017_Training_Part1_GroundTruth'),
    (2017, 'val', 'ISIC-2017_Validation_Data', 'ISIC-2017_Validation_Part1_GroundTruth'),
    (2017, 'test', 'ISIC-2017_Test_v2_Data', 'ISIC-2017_Test_v2_Part1_GroundTruth'),
    (2018, 'train', 'ISIC2018_Task1-2_Training_Input', 'ISIC2018_Task1_Training_GroundTruth'),
    (2018, 'val', 'ISIC2018_Task1-2_Validation_Input', 'ISIC2018_Task1_Validation_GroundTruth'),
    (2018, 'test', 'ISIC2018_Task1-2_Test_Input', 'ISIC2018_Task1_Test_GroundTruth'),
])
def test_isic_in_the_challenges_own_folders(tmp_path, year, part, images, masks):
    for name in ('ISIC_0000001', 'ISIC_0000002'):
        write_pair(tmp_path, name, '_segmentation', images, masks)
        (tmp_path / images / f'{name}_superpixels.png').write_bytes(b'')
    for name in (images, masks):
        (tmp_path / name / 'ATTRIBUTION.txt').touch()
        (tmp_path / name / 'LICENSE.txt').touch()
    dataset = ISICDataset(year=year, part=part, data_root=str(tmp_path))
    assert names(dataset) == ['ISIC_0000001', 'ISIC_0000002']
    assert dataset.get_data_info(1)['seg_map_path'] == str(tmp_path / masks / 'ISIC_0000002_segmentation.png')


def test_a_part_of_isic_can_be_narrowed_down(tmp_path, unchecked):
    stems = [f'ISIC_{number:07}' for number in range(10)]
    touch(tmp_path, stems, 'ISIC2018_Task1-2_Training_Input', 'ISIC2018_Task1_Training_GroundTruth', '_segmentation')
    parts = [names(ISICDataset(data_root=str(tmp_path), split=split, train_ratio=0.8)) for split in ('train', 'val')]
    assert [len(part) for part in parts] == [8, 2] and sorted(parts[0] + parts[1]) == stems
    (tmp_path / 'mine.txt').write_text('ISIC_0000003\n')
    assert names(ISICDataset(data_root=str(tmp_path), ann_file='mine.txt')) == ['ISIC_0000003']


def test_isic_without_a_part_names_the_folder_that_is_missing(tmp_path):
    with pytest.raises(DataError, match='ISICDataset: the folder .*ISIC2018_Task1-2_Test_Input does not exist'):
        ISICDataset(part='test', data_root=str(tmp_path))


def test_the_package_has_the_list_for_kvasir(tmp_path, unchecked):
    train, val = [[line[:-len('.jpg')] for line in (LISTS / f'{split}.txt').read_text().splitlines()]
                  for split in ('train', 'val')]
    assert len(train) == 700 and len(val) == 300 and len({*train, *val}) == 1000
    touch(tmp_path, [*train, *val])
    (tmp_path / 'kavsir_bboxes.json').touch()
    assert names(KvasirSEGDataset(data_root=str(tmp_path), split='train')) == train
    assert names(KvasirSEGDataset(data_root=str(tmp_path), split='val')) == val
    assert len(KvasirSEGDataset(data_root=str(tmp_path))) == 1000
    own = names(KvasirSEGDataset(data_root=str(tmp_path), split='val', train_ratio=0.5))
    assert len(own) == 500 and set(own) != set(val)
    assert KvasirSEGDataset.METAINFO['classes'] == ('background', 'polyp')


def test_kvasir_with_wrong_arguments_or_without_some_of_its_images(folder):
    with pytest.raises(ValueError, match="split must be 'train', 'val' or None, got 'test'"):
        KvasirSEGDataset(data_root=str(folder), split='test')
    with pytest.raises(ValueError, match="ann_file='x.txt' and split='val' both say"):
        KvasirSEGDataset(data_root=str(folder), split='val', ann_file='x.txt')
    with pytest.raises(DataError, match='700 of the 700 images in the list .*train.txt have no image in .*images'):
        KvasirSEGDataset(data_root=str(folder), split='train')


# The real data

def equal_to_thresholded(dataset, count):
    """Masks that the pipeline loads, against those that OpenCV reads, over the data set."""
    for index in range(0, len(dataset), len(dataset) // count):
        sample = dataset.get_data_info(index)
        datasets._check_pair((sample['img_path'], sample['seg_map_path']))
        expected = cv2.imread(sample['seg_map_path'], cv2.IMREAD_GRAYSCALE) >= 128
        mask = kcla_mm.segmentation.LoadBinaryMask()(sample)['gt_seg_map']
        assert mask.dtype == np.uint8 and mask.any() and not mask.all()
        np.testing.assert_array_equal(mask, expected)


def test_kvasir_as_downloaded(shared_data, unchecked):
    root = str(shared_data('Kvasir-SEG'))
    train, val = [KvasirSEGDataset(data_root=root, split=split) for split in ('train', 'val')]
    assert len(train) == 700 and len(val) == 300
    assert sorted(names(train) + names(val)) == sorted(path.stem for path in Path(root, 'images').glob('*.jpg'))


def test_isic_2018_as_downloaded(shared_data, unchecked):
    shared_data('ISIC2018_Task1-2_Training_Input')
    assert len(ISICDataset(data_root=str(shared_data()), part='train')) == 600
    assert len(ISICDataset(data_root=str(shared_data()), part='val')) == 150


def test_masks_of_kvasir(shared_data, monkeypatch):
    root = str(shared_data('Kvasir-SEG'))
    check = datasets._check_pair
    monkeypatch.setattr(datasets, '_check_pair', lambda pair: None)
    dataset = KvasirSEGDataset(data_root=root)
    monkeypatch.setattr(datasets, '_check_pair', check)
    equal_to_thresholded(dataset, 5)


def test_masks_of_isic(shared_data, monkeypatch):
    shared_data('ISIC2018_Task1-2_Validation_Input')
    check = datasets._check_pair
    monkeypatch.setattr(datasets, '_check_pair', lambda pair: None)
    dataset = ISICDataset(data_root=str(shared_data()), part='val')
    monkeypatch.setattr(datasets, '_check_pair', check)
    equal_to_thresholded(dataset, 3)
