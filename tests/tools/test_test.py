import json
import pickle
import re

import cv2
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

ANNOTATIONS = 'data/shapes/annotations/instances_val.json'


@pytest.fixture(scope='module')
def folder(shapes):
    """With a detector, jittered.py and jittered.pth, that finds the truth but for some errors."""
    (shapes / 'jittered.py').write_text("""
_base_ = 'kcla_mm::faster_rcnn_r18_kcla_shapes.py'
custom_imports = dict(imports=['kcla_mm', 'plugins'])
model = dict(_delete_=True, type='JitteredTruth', data_preprocessor=dict(type='DetDataPreprocessor'))
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape')),
]
test_dataloader = dict(num_workers=0, persistent_workers=False, dataset=dict(pipeline=test_pipeline))
test_evaluator = dict(metric=['bbox', 'segm'])
""")
    torch.save(dict(state_dict=dict(parameter=torch.ones(()))), shapes / 'jittered.pth')
    return shapes


def precisions(folder, kind):
    """What pycocotools makes of a file of results, rounded as a table has it."""
    truth = COCO(str(folder / ANNOTATIONS))
    evaluation = COCOeval(truth, truth.loadRes(str(folder / f'out/results.{kind}.json')), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return [f'{value:.3f}' for value in evaluation.stats[:6]]


def test_printed_ap_is_what_pycocotools_makes_of_the_results(run_tool, folder):
    printed = run_tool('test.py', 'jittered.py', 'jittered.pth', '--out', 'out/results.json', '--show-dir', 'drawn',
                       cwd=folder)
    assert sorted(path.name for path in (folder / 'out').iterdir()) == ['results.bbox.json', 'results.segm.json']
    for kind in ('bbox', 'segm'):
        line = re.search(rf'{kind}_mAP_copypaste: (.*)', printed)[1].split()
        assert line == precisions(folder, kind)
        assert 0 < float(line[0]) < 1
        assert f'out/results.{kind}.json' in printed
    assert precisions(folder, 'bbox') != precisions(folder, 'segm')

    for image in (folder / 'data/shapes/val').iterdir():  # the annotations at the left of the results
        height, width = cv2.imread(str(image)).shape[:2]
        assert cv2.imread(str(folder / 'drawn' / image.name)).shape == (height, 2 * width, 3)


def test_results_as_pickle(run_tool, folder):
    run_tool('test.py', 'jittered.py', 'jittered.pth', '--out', 'pickled/results.pkl', cwd=folder)
    assert [path.name for path in (folder / 'pickled').iterdir()] == ['results.pkl']
    results = pickle.loads((folder / 'pickled/results.pkl').read_bytes())
    images = json.loads((folder / ANNOTATIONS).read_text())['images']
    assert sorted(result['img_id'] for result in results) == sorted(image['id'] for image in images)
    assert all(len(result['pred_instances']['bboxes']) for result in results)


@pytest.mark.parametrize('args, message', [
    (['nowhere.pth'], 'error: nowhere.pth does not exist'),
    (['jittered.pth', '--out', 'results.txt'], 'error: --out must end in .json, .csv or .pkl, got results.txt'),
    (['jittered.pth', '--out', 'results.json', '--cfg-options', 'test_evaluator.type=VOCMetric'],
     'error: --out results.json needs a CocoMetric as test_evaluator, got VOCMetric'),
    (['jittered.pth', '--show-dir', 'jittered.py'], 'error: --show-dir '),
    (['jittered.pth', '--show-dir', 'drawings', '--cfg-options', 'default_hooks.visualization.type=Hook'],
     'error: --show-dir needs default_hooks.visualization of type DetVisualizationHook or '
     'VisualizationHook in the config, got Hook'),
    (['jittered.pth', '--cfg-options', 'test_evaluator.ann_file=val.json'], 'error: val.json does not exist'),
])
def test_mistakes_are_found_before_the_model_is_built(mistake, folder, args, message):
    assert mistake('test', 'jittered.py', *args, '--work-dir', 'mistaken', cwd=folder).startswith(message)
    assert not any((folder / name).exists() for name in ('mistaken', 'drawings', 'results.bbox.json'))
