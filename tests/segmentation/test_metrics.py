"""LesionMetric against sets of pixels, in one process and in two."""
import csv
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mmengine.dataset import DefaultSampler
from mmengine.evaluator import Evaluator
from mmengine.structures import PixelData
from mmseg.registry import METRICS
from mmseg.structures import SegDataSample

from kcla_mm.segmentation import LesionMetric

META = dict(classes=('background', 'lesion'))


def sample(prediction, truth, path='a.jpg'):
    """What a model and a data set give for an image."""
    prediction, truth = [torch.as_tensor(np.atleast_2d(labels))[None] for labels in (prediction, truth)]
    return SegDataSample(metainfo=dict(img_path=path), pred_sem_seg=PixelData(data=prediction.float()),
                         gt_sem_seg=PixelData(data=truth.long()))


def evaluate(samples, **kwargs):
    evaluator = Evaluator(LesionMetric(**kwargs))
    evaluator.dataset_meta = META
    for one in samples:
        evaluator.process([one])
    return evaluator.evaluate(len(samples))


def row(tp=0, fp=0, fn=0, tn=0, **kwargs):
    """A single row of pixels with these counts."""
    return sample([1] * (tp + fp) + [0] * (fn + tn), [1] * tp + [0] * fp + [1] * fn + [0] * tn, **kwargs)


def random_masks(count, seed=0):
    """Predictions and truths of several sizes, some of them empty, some pixels to be ignored."""
    random = np.random.default_rng(seed)
    pairs = []
    for index in range(count):
        size = random.integers(5, 30, 2)
        truth = (random.random(size) < random.random()).astype(np.uint8)
        prediction = np.where(random.random(size) < 0.3, 1 - truth, truth)
        if index % 4 == 1:
            truth[:] = 0
        truth[random.random(size) < 0.1] = 255
        pairs.append((prediction, truth))
    return pairs


def plainly(pairs):
    """The scores from sets of pixels."""
    pooled = dict(found=set(), lesion=set(), all=set())
    image_iou, image_dsc = [], []
    for index, (prediction, truth) in enumerate(pairs):
        everything = {(index, i, j) for i, j in np.ndindex(truth.shape) if truth[i, j] != 255}
        lesion = {pixel for pixel in everything if truth[pixel[1:]] == 1}
        found = {pixel for pixel in everything if prediction[pixel[1:]] == 1}
        for name, pixels in (('found', found), ('lesion', lesion), ('all', everything)):
            pooled[name] |= pixels
        image_iou.append(len(found & lesion) / len(found | lesion) if found | lesion else 1.)
        image_dsc.append(2 * len(found & lesion) / (len(found) + len(lesion)) if found | lesion else 1.)
    found, lesion, everything = pooled['found'], pooled['lesion'], pooled['all']
    background = everything - lesion
    return {name: 100 * score for name, score in dict(
        mIoU=len(found & lesion) / len(found | lesion), DSC=2 * len(found & lesion) / (len(found) + len(lesion)),
        Acc=1 - len(found ^ lesion) / len(everything), Sen=len(found & lesion) / len(lesion),
        Spe=len(background - found) / len(background), img_IoU=np.mean(image_iou), img_DSC=np.mean(image_dsc),
        th_Jac=np.mean([score if score >= 0.65 else 0 for score in image_iou])).items()}


def test_scores_are_those_of_sets_of_pixels():
    pairs = random_masks(9)
    expected = plainly(pairs)
    scores = evaluate([sample(*pair) for pair in pairs])
    assert list(scores) == list(expected)
    assert scores == pytest.approx(expected, abs=0.005001)
    assert len(set(scores.values())) == len(scores)


def test_a_batch_of_several_images():
    pairs = random_masks(4)
    evaluator = Evaluator(LesionMetric(prefix='val'))
    evaluator.dataset_meta = META
    evaluator.process([sample(*pair) for pair in pairs])
    expected = {f'val/{name}': score for name, score in evaluate([sample(*pair) for pair in pairs]).items()}
    assert evaluator.evaluate(4) == expected


def test_pooled_scores_weigh_pixels_and_the_others_images():
    scores = evaluate([row(tp=90, tn=10), row(fn=5, fp=5, tn=10)])
    assert scores['mIoU'] == 90 and scores['img_IoU'] == 50
    assert scores['DSC'] == pytest.approx(100 * 180 / 190, abs=0.005) and scores['img_DSC'] == 50


def test_an_empty_mask_predicted_empty_is_right():
    assert set(evaluate([row(tn=20)]).values()) == {100.}
    wrong = evaluate([row(fp=1, tn=19)])
    assert wrong == dict(mIoU=0, DSC=0, Acc=95, Sen=100, Spe=95, img_IoU=0, img_DSC=0, th_Jac=0)


@pytest.mark.parametrize('counts, score', [(dict(tp=13, fp=7), 65), (dict(tp=65, fn=35), 65), (dict(tp=26, fn=14), 65),
                                           (dict(tp=6499, fn=3501), 0), (dict(tp=6501, fn=3499), 65.01)])
def test_the_thresholded_jaccard_index_counts_from_65_percent(counts, score):
    assert evaluate([row(**counts)])['th_Jac'] == score


def test_ignored_pixels_do_not_count():
    assert evaluate([sample([1, 1, 0, 1], [1, 255, 255, 1])]) == evaluate([row(tp=2)])
    other = evaluate([sample([1, 1, 0, 1], [1, 7, 7, 1])], ignore_index=7)
    assert other == evaluate([row(tp=2)])
    assert set(evaluate([sample([1, 0], [255, 255])]).values()) == {100.}


# The table of images

@pytest.mark.parametrize('absolute', [True, False])
def test_a_row_for_each_image_the_worst_first(tmp_path, monkeypatch, absolute):
    monkeypatch.chdir(tmp_path)
    out_file = tmp_path / 'new/scores.csv' if absolute else 'new/scores.csv'
    images = [row(tp=3, fp=1, tn=2, path='data/good.jpg'), row(fn=4, tn=2, path='data/missed, one.jpg'),
              row(tp=1, fn=1, fp=1, path='/data/größer.jpg')]
    evaluate(images[::-1], out_file='new/scores.csv')
    evaluate(images, out_file=out_file)  # replaces the one before
    with open(tmp_path / 'new/scores.csv', newline='', encoding='utf-8') as file:
        header, *rows = csv.reader(file)
    assert header == ['image', 'IoU', 'DSC', 'tp', 'fp', 'fn', 'tn']
    assert rows == [['data/missed, one.jpg', '0.00', '0.00', '0', '0', '4', '2'],
                    ['/data/größer.jpg', '33.33', '50.00', '1', '1', '1', '0'],
                    ['data/good.jpg', '75.00', '85.71', '3', '1', '0', '2']]
    assert os.listdir(tmp_path / 'new') == ['scores.csv']


def test_the_table_is_a_csv_file():
    with pytest.raises(ValueError, match='out_file must end in .csv, got scores.xlsx'):
        LesionMetric(out_file='scores.xlsx')


# Mistakes

def test_it_is_for_two_classes():
    evaluator = Evaluator(METRICS.build(dict(type='LesionMetric')))
    with pytest.raises(ValueError, match=r"two classes, background and lesion, the data set has 3: \('a', 'b', 'c'\)"):
        evaluator.dataset_meta = dict(classes=('a', 'b', 'c'))


@pytest.mark.parametrize('images, message', [
    (sample(np.zeros((4, 5)), np.zeros((5, 4))), r'a.jpg: the prediction is of size \(4, 5\), .* of \(5, 4\): place'),
    (sample([0, 1, 0], [0, 1, 2]), r'a.jpg: labels must be 0 and 1, got \[0, 1, 2\] in the ground truth'),
    (sample([2, 1, 0], [0, 1, 0]), r'a.jpg: labels must be 0 and 1, .*\[0, 1, 2\] in the prediction'),
    (SegDataSample(metainfo=dict(img_path='a.jpg'), pred_sem_seg=PixelData(data=torch.zeros(1, 4, 5))),
     'a.jpg has no ground truth: the pipeline needs LoadBinaryMask'),
])
def test_what_cannot_be_scored(images, message):
    with pytest.raises(ValueError, match=message):
        evaluate([images])


# Two processes

def score_a_share(rank, folder, count):
    """One of two processes. If the number of images is odd, DefaultSampler gives one of them to both."""
    torch.set_num_threads(1)
    dist.init_process_group('gloo', f'file://{folder}/meet', rank=rank, world_size=2)
    images = [sample(*pair, path=f'{index}.jpg') for index, pair in enumerate(random_masks(count))]
    evaluator = Evaluator(LesionMetric(out_file=folder / 'two.csv'))
    evaluator.dataset_meta = META
    for index in DefaultSampler(range(count), shuffle=False):
        evaluator.process([images[index]])
    torch.save(evaluator.evaluate(count), folder / f'{rank}.pth')  # no destroy_process_group, where Gloo may hang


def test_two_processes_score_as_one_does(tmp_path):
    images = [sample(*pair, path=f'{index}.jpg') for index, pair in enumerate(random_masks(5))]
    expected = evaluate(images, out_file=tmp_path / 'one.csv')
    mp.start_processes(score_a_share, (tmp_path, 5), nprocs=2, start_method='fork')
    assert torch.load(tmp_path / '0.pth', weights_only=False) == expected
    assert torch.load(tmp_path / '1.pth', weights_only=False) == expected
    assert (tmp_path / 'two.csv').read_text() == (tmp_path / 'one.csv').read_text()
