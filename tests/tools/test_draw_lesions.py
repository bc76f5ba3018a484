import hashlib
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmseg.registry import DATASETS

import kcla_mm

TOOL = Path(__file__).parents[2] / 'tools' / 'draw_lesions.py'


def draw(out, *options):
    return subprocess.run([sys.executable, TOOL, out, '--train', '40', '--val', '6', *options],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)


def read(folder):
    """Images and masks by name; OpenCV reads nothing else than these two kinds of file."""
    images = {path.stem: cv2.imread(str(path)) for path in sorted((folder / 'images').iterdir())}
    masks = {path.stem: cv2.imread(str(path), cv2.IMREAD_UNCHANGED) for path in sorted((folder / 'masks').iterdir())}
    return images, masks


def digest(folder):
    return hashlib.sha256(b''.join(mask.tobytes() for mask in read(folder)[1].values())).hexdigest()


@pytest.fixture(scope='module')
def lesions(tmp_path_factory):
    out = tmp_path_factory.mktemp('data') / 'lesions'
    assert draw(out).returncode == 0
    return out


def test_every_image_has_a_mask_and_is_in_one_list(lesions):
    images, masks = read(lesions)
    train, val = ((lesions / f'{split}.txt').read_text().split() for split in ('train', 'val'))
    assert (len(train), len(val)) == (40, 6)
    assert sorted(train + val) == sorted(images) == sorted(masks)
    assert len({image.tobytes() for image in images.values()}) == 46


def test_masks_are_black_and_white_and_of_the_size_of_the_images(lesions, tmp_path):
    draw(tmp_path / 'large', '--train', '1', '--val', '1', '--size', '150')
    for folder, size in ((lesions, 96), (tmp_path / 'large', 150)):
        images, masks = read(folder)
        for name, mask in masks.items():
            assert images[name].shape == (size, size, 3) and mask.shape == (size, size)
            assert set(np.unique(mask)) == {0, 255}


def test_lesions_are_dark_many_of_them_faint(lesions):
    images, masks = read(lesions)
    contrasts, areas = [], []
    for name, mask in masks.items():
        green = images[name][..., 1].astype(float)
        around = cv2.dilate(mask, np.ones((15, 15))) - cv2.dilate(mask, np.ones((7, 7)))
        contrasts.append(np.median(green[around == 255]) - np.median(green[mask == 255]))
        areas.append((mask == 255).mean())
    assert np.mean(np.greater(contrasts, 5)) > 0.95
    assert min(contrasts) < 25 and max(contrasts) > 60
    assert 0.01 < min(areas) < 0.06 and 0.2 < max(areas) < 0.6


def test_a_threshold_does_not_find_them(lesions):
    images, masks = read(lesions)
    scores = []
    for name, mask in masks.items():
        _, dark = cv2.threshold(images[name][..., 1], 0, 255, cv2.THRESH_BINARY_INV | cv2.THRESH_OTSU)
        scores.append(2 * ((dark == 255) & (mask == 255)).sum() / ((dark == 255).sum() + (mask == 255).sum()))
    assert np.mean(scores) < 0.75


def test_the_same_seed_draws_the_same_on_any_machine(lesions, tmp_path):
    assert digest(lesions) == '438c61317c30ba21a9d902f4729f43108c5c928c55027e845f259fdde7d7ba0d'
    draw(tmp_path / 'again')
    for file in lesions.rglob('*.*'):
        assert file.read_bytes() == (tmp_path / 'again' / file.relative_to(lesions)).read_bytes()
    draw(tmp_path / 'other', '--seed', '1')
    assert digest(tmp_path / 'other') != digest(lesions)


def test_the_config_of_the_demo_reads_it(lesions):
    config = Config.fromfile(kcla_mm.config_path('unet_kcla_lesions.py'))
    for loader, number in ((config.train_dataloader, 40), (config.test_dataloader, 6)):
        with DefaultScope.overwrite_default_scope('mmseg'):
            dataset = DATASETS.build({**loader.dataset, 'data_root': str(lesions)})
        assert len(dataset) == number
        sample = dataset[0]
        assert sample['inputs'].shape == (3, 96, 96)
        assert sample['data_samples'].gt_sem_seg.data.unique().tolist() == [0, 1]


def test_a_complete_data_set_is_kept(lesions):
    before = {file: file.stat().st_mtime_ns for file in lesions.rglob('*')}
    again = draw(lesions)
    assert again.returncode == 0 and 'kept' in again.stdout
    assert 'seed=1' in draw(lesions, '--seed', '1').stdout
    assert {file: file.stat().st_mtime_ns for file in lesions.rglob('*')} == before


@pytest.mark.parametrize('spoil', [
    lambda folder: (folder / 'images' / 'val_0001.jpg').unlink(),
    lambda folder: (folder / 'masks' / 'train_0001.png').unlink(),
    lambda folder: (folder / 'train.txt').write_text('val_0001\n'),
    lambda folder: (folder / 'val.txt').unlink(),
    lambda folder: (folder / 'info.json').write_text('{"train": '),
    lambda folder: (folder / 'info.json').rename(folder / 'mine.json'),
])
def test_anything_else_is_refused_and_left_alone(tmp_path, spoil):
    out = tmp_path / 'lesions'
    draw(out, '--train', '1', '--val', '1')
    spoil(out)
    before = {file: file.stat().st_mtime_ns for file in out.rglob('*')}
    refused = draw(out, '--train', '1', '--val', '1')
    assert refused.returncode == 1 and refused.stdout.startswith(f'error: {out} is there')
    assert {file: file.stat().st_mtime_ns for file in out.rglob('*')} == before
