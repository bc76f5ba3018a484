import hashlib
import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from pycocotools.coco import COCO

TOOL = Path(__file__).parents[2] / 'tools' / 'draw_shapes.py'


def draw(out, *options):
    return subprocess.run([sys.executable, TOOL, out, '--train', '40', '--val', '6', *options],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)


def digest(folder):
    files = sorted((folder / 'annotations').iterdir())
    return hashlib.sha256(b''.join(file.read_bytes() for file in files)).hexdigest()


@pytest.fixture(scope='module')
def shapes(tmp_path_factory):
    out = tmp_path_factory.mktemp('data') / 'shapes'
    assert draw(out).returncode == 0
    return out


@pytest.fixture(scope='module')
def coco(shapes):
    return COCO(shapes / 'annotations' / 'instances_train.json')


def test_every_image_is_there_at_its_size(shapes, coco):
    assert len(coco.imgs) == len(list((shapes / 'train').iterdir())) == 40
    for image in coco.imgs.values():
        assert cv2.imread(str(shapes / 'train' / image['file_name'])).shape == (192, 192, 3)


def test_box_and_area_are_those_of_the_mask(coco):
    for annotation in coco.anns.values():
        mask = coco.annToMask(annotation)
        rows, columns = np.nonzero(mask)
        assert annotation['area'] == mask.sum() > 0
        assert annotation['bbox'] == [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1]


def test_masks_of_an_image_do_not_overlap(coco):
    for image in coco.imgs:
        masks = [coco.annToMask(annotation) for annotation in coco.imgToAnns[image]]
        assert np.sum(masks, axis=0).max() == 1


def test_all_kinds_of_objects_occur(coco):
    crowds = [a for a in coco.anns.values() if a['iscrowd']]
    objects = [a for a in coco.anns.values() if not a['iscrowd']]
    assert crowds
    assert {coco.cats[a['category_id']]['name'] for a in objects} == {'circle', 'square', 'triangle'}
    areas = [a['area'] for a in objects]  # COCO's ranges: small, medium and large
    assert min(areas) < 32**2 and any(32**2 < area < 96**2 for area in areas) and max(areas) > 96**2


def test_objects_differ_from_their_surroundings(shapes, coco):
    annotation = coco.anns[1]
    image = cv2.imread(str(shapes / 'train' / coco.imgs[annotation['image_id']]['file_name'])).astype(float)
    mask = coco.annToMask(annotation)
    around = cv2.dilate(mask, np.ones((9, 9))) - cv2.dilate(mask, np.ones((3, 3)))
    inside = cv2.erode(mask, np.ones((3, 3)))
    assert np.abs(image[inside == 1].mean(0) - image[around == 1].mean(0)).sum() > 50


def test_the_same_seed_draws_the_same_on_any_machine(shapes, tmp_path):
    assert digest(shapes) == 'ecebad592b0d28ea6a3acceaefccf6ed5b85fffca9f7465b49728536facc0058'
    draw(tmp_path / 'again')
    for file in shapes.rglob('*.*'):
        assert file.read_bytes() == (tmp_path / 'again' / file.relative_to(shapes)).read_bytes()
    draw(tmp_path / 'other', '--seed', '1')
    assert digest(tmp_path / 'other') != digest(shapes)


def test_validation_images_are_not_training_images(shapes):
    assert not ({file.read_bytes() for file in (shapes / 'train').iterdir()}
                & {file.read_bytes() for file in (shapes / 'val').iterdir()})


def test_a_complete_data_set_is_kept(shapes):
    before = {file: file.stat().st_mtime_ns for file in shapes.rglob('*')}
    again = draw(shapes)
    assert again.returncode == 0 and 'kept' in again.stdout
    assert {file: file.stat().st_mtime_ns for file in shapes.rglob('*')} == before


@pytest.mark.parametrize('spoil', [
    lambda folder: next((folder / 'val').iterdir()).unlink(),
    lambda folder: (folder / 'annotations' / 'instances_train.json').write_text('{"images": ['),
    lambda folder: (folder / 'annotations' / 'instances_train.json').write_text(json.dumps([1])),
    lambda folder: (folder / 'annotations' / 'instances_val.json').rename(folder / 'mine.json'),
])
def test_anything_else_is_refused_and_left_alone(tmp_path, spoil):
    out = tmp_path / 'shapes'
    draw(out)
    spoil(out)
    before = {file: file.stat().st_mtime_ns for file in out.rglob('*')}
    refused = draw(out)
    assert refused.returncode == 1 and refused.stdout.startswith(f'error: {out} is there')
    assert {file: file.stat().st_mtime_ns for file in out.rglob('*')} == before


def test_other_arguments_do_not_overwrite(shapes):
    assert 'seed=1' in draw(shapes, '--seed', '1').stdout
    assert draw(shapes).returncode == 0


def test_a_failure_leaves_nothing(tmp_path):
    (tmp_path / 'file').write_text('')
    assert draw(tmp_path / 'file' / 'shapes').returncode == 1
    assert draw(tmp_path / 'file').returncode == 1
    assert [file.name for file in tmp_path.iterdir()] == ['file']


@pytest.mark.parametrize('options', [('--size', '10'), ('--train', '0'), ('--seed', '-1'), ('--val', 'x')])
def test_bad_arguments_are_named(tmp_path, options):
    refused = draw(tmp_path / 'shapes', *options)
    assert refused.returncode == 2 and options[0] in refused.stdout and options[1] in refused.stdout
    assert not (tmp_path / 'shapes').exists()
