"""Segmenters through the tools: from drawn lesions to scores, pictures and masks."""
import csv
import re

import cv2
import numpy as np
import pytest

CHECKPOINT = 'work_dirs/tiny_unet/best_DSC_epoch_1.pth'


@pytest.fixture(scope='module')
def folder(run_tool, tmp_path_factory):
    """Where the config tiny_unet.py was trained for an epoch on drawn lesions."""
    folder = tmp_path_factory.mktemp('lesions')
    run_tool('draw_lesions.py', 'data/lesions', '--train', 6, '--val', 3, '--size', 64, cwd=folder)
    (folder / 'tiny_unet.py').write_text("""
_base_ = 'kcla_mm::unet_kcla_lesions.py'
model = dict(decode_head=dict(threshold=0.3))  # so that something is found
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False)
val_dataloader = dict(num_workers=0, persistent_workers=False)
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=1, val_interval=1)
default_hooks = dict(checkpoint=dict(save_best='DSC', rule='greater'))
""")
    printed = run_tool('train.py', 'tiny_unet.py', cwd=folder)
    assert re.search(r'mIoU .* DSC .* Acc .* Sen .* Spe .* img_IoU .* img_DSC .* th_Jac', printed)
    return folder


@pytest.fixture(scope='module')
def tested(run_tool, folder):
    """What testing printed, and the rows of its table of images by name."""
    printed = run_tool('test.py', 'tiny_unet.py', CHECKPOINT, '--out', 'out/scores.csv', '--show-dir', 'drawn',
                       cwd=folder)
    with open(folder / 'out/scores.csv', newline='') as file:
        return printed, {row['image']: row for row in csv.DictReader(file)}


def validation_images(folder):
    names = (folder / 'data/lesions/val.txt').read_text().split()
    return [folder / 'data/lesions/images' / f'{name.split(".")[0]}.jpg' for name in names]


def test_the_table_of_images_adds_up_to_the_scores(folder, tested):
    printed, rows = tested
    assert 'Results are in out/scores.csv' in printed
    images = validation_images(folder)
    assert sorted(rows) == sorted(str(image.relative_to(folder)) for image in images)
    counts = {name: sum(int(row[name]) for row in rows.values()) for name in ('tp', 'fp', 'fn', 'tn')}
    assert sum(counts.values()) == 3 * 64 * 64
    lesions = sum((cv2.imread(str(image).replace('images', 'masks').replace('.jpg', '.png')) > 127).sum() / 3
                  for image in images)
    assert counts['tp'] + counts['fn'] == lesions
    score = float(re.search(r' DSC: ([\d.]+)', printed)[1])
    assert score == pytest.approx(200 * counts['tp'] / (2 * counts['tp'] + counts['fp'] + counts['fn']), abs=0.005)
    assert 0 < score < 100


def test_pictures_have_the_names_of_the_images(folder, tested):
    pictures = sorted((folder / 'drawn').iterdir())
    assert [picture.name for picture in pictures] == sorted(f'{image.stem}.png' for image in validation_images(folder))
    for picture in pictures:
        colours = cv2.imread(str(picture)).reshape(-1, 3)
        assert (colours == (255, 229, 0)).all(1).any(), 'the contour of the truth, and the legend'


def test_other_visualisers_draw_too(run_tool, folder):
    run_tool('test.py', 'tiny_unet.py', CHECKPOINT, '--show-dir', 'overlaid', '--cfg-options',
             'visualizer.type=SegLocalVisualizer', 'test_dataloader.dataset.indices=1', cwd=folder)
    picture, = (folder / 'overlaid').iterdir()
    assert cv2.imread(str(picture)).shape == (64, 128, 3), 'truth and prediction side by side'


def test_inference_finds_what_testing_finds(run_tool, folder, tested):
    images = validation_images(folder)
    run_tool('infer.py', 'tiny_unet.py', CHECKPOINT, *images, '--out-dir', 'inferred', cwd=folder)
    for image in images:
        mask = cv2.imread(str(folder / 'inferred/preds' / f'{image.stem}.png'), cv2.IMREAD_UNCHANGED)
        assert mask.shape == (64, 64) and set(np.unique(mask)) <= {0, 255}
        row = tested[1][str(image.relative_to(folder))]
        assert (mask == 255).sum() == int(row['tp']) + int(row['fp'])
        assert (folder / 'inferred/vis' / image.name).exists()


@pytest.mark.parametrize('options, message', [
    ('train_dataloader.dataset.ann_file=no.txt', 'error: data/lesions/no.txt does not exist'),
    ('train_dataloader.dataset.data_root=nowhere', 'error: nowhere'),
    ('train_dataloader.dataset.data_prefix.img_path=images train_dataloader.dataset.data_prefix.seg_map_path=images',
     'error: the mask data/lesions/images'),
    ('train_dataloader.dataset.split=trian', "split must be 'train', 'val' or None, got 'trian'"),
    ('model.backbone.attention.type=KLCA', "], got 'KLCA'"),
    ('val_dataloader.dataset.mask_suffix=_mask', 'has no images (*_mask with .jpg'),
])
def test_mistakes_are_found_before_training(run_tool, folder, options, message):
    printed = run_tool('train.py', 'tiny_unet.py', '--work-dir', 'mistaken', '--cfg-options', *options.split(),
                       cwd=folder, status=1)
    error = printed[printed.rindex('error: '):]
    assert message in error and 'Traceback' not in printed
    assert not list(folder.glob('mistaken/*.pth'))
