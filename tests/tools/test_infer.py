import json
import shutil
from collections import defaultdict

import cv2
import numpy as np
import pytest
import torch

CHECKPOINT = 'work_dirs/tiny/epoch_2.pth'


def test_finds_what_testing_finds(run_tool, trained):
    folder, _ = trained
    images = sorted((folder / 'data/shapes/val').iterdir())
    elsewhere = folder / 'elsewhere'
    elsewhere.mkdir()
    for image in images[2:]:
        shutil.copy(image, elsewhere)
    (elsewhere / 'notes.txt').write_text('not an image, in a folder of images')
    printed = run_tool('infer.py', 'tiny.py', CHECKPOINT, *images[:2], elsewhere, '--out-dir', 'inferred', cwd=folder)
    assert '4/4' in printed and 'inferred' in printed
    assert sorted(path.name for path in (folder / 'inferred/preds').iterdir()) == \
        [f'{image.stem}.json' for image in images]
    assert sorted(path.name for path in (folder / 'inferred/vis').iterdir()) == [image.name for image in images]
    for image in images:
        assert cv2.imread(str(folder / 'inferred/vis' / image.name)).shape == cv2.imread(str(image)).shape

    run_tool('test.py', 'tiny.py', CHECKPOINT, '--out', 'tested.json', cwd=folder)
    annotations = json.loads((folder / 'data/shapes/annotations/instances_val.json').read_text())
    names = {image['id']: image['file_name'] for image in annotations['images']}
    tested = defaultdict(list)
    for result in json.loads((folder / 'tested.bbox.json').read_text()):
        x, y, width, height = result['bbox']
        tested[names[result['image_id']]].append((x, y, x + width, y + height, result['score']))
    for image in images:
        found = json.loads((folder / f'inferred/preds/{image.stem}.json').read_text())
        assert len(found['labels']) == len(found['scores'])
        np.testing.assert_allclose(np.column_stack([found['bboxes'], found['scores']]), tested[image.name], rtol=1e-4,
                                   atol=1e-3)


@pytest.fixture
def images(trained, tmp_path):
    """A folder with an image, a.jpg, and some that give trouble."""
    image = next((trained[0] / 'data/shapes/val').iterdir())
    for name in ('a.jpg', 'other/a.png', 'vis/a.jpg'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(image, tmp_path / name)
    (tmp_path / 'broken').mkdir()
    (tmp_path / 'broken/b.jpg').write_text('not an image')
    (tmp_path / 'empty').mkdir()
    return tmp_path


@pytest.mark.parametrize('args, message', [
    (['a.jpg', 'no.jpg', '--out-dir', 'out'], 'error: no.jpg does not exist'),
    (['a.jpg', 'broken', '--out-dir', 'out'], 'error: broken/b.jpg is not an image that can be read'),
    (['a.jpg', 'empty', '--out-dir', 'out'], 'error: the folder empty has no images'),
    (['a.jpg', 'other', '--out-dir', 'out'], 'error: the results of a.jpg and other/a.png would both be out/preds/a'),
    (['a.jpg', '--out-dir', 'a.jpg'], 'error: --out-dir a.jpg is a file'),
    (['vis/a.jpg', '--out-dir', '.'], 'error: the drawn result would replace the image vis/a.jpg'),
    (['a.jpg', '--out-dir', 'out', '--cfg-options', 'default_scope=mmocr'],
     "error: the config must be of mmdet or mmseg or mmpretrain, got default_scope='mmocr'"),
])
def test_mistakes_are_found_before_anything_is_written(mistake, trained, images, args, message):
    folder, _ = trained
    before = sorted(images.rglob('*'))
    assert mistake('infer', folder / 'tiny.py', folder / CHECKPOINT, *args, cwd=images).startswith(message)
    assert sorted(images.rglob('*')) == before


def test_missing_checkpoint(mistake, trained, images):
    message = mistake('infer', trained[0] / 'tiny.py', 'no.pth', 'a.jpg', '--out-dir', 'out', cwd=images)
    assert message.startswith('error: no.pth does not exist')
    assert 'ln -s' not in message, 'that is for data'


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_a_gpu_that_is_not_there(mistake, trained, images):
    message = mistake('infer', trained[0] / 'tiny.py', trained[0] / CHECKPOINT, 'a.jpg', '--out-dir', 'out', '--device',
                      'cuda:0', cwd=images)
    assert message == 'error: --device cuda:0: PyTorch sees no GPU'
