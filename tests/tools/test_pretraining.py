"""From a classifier with layer attention to detectors and segmenters that start from its weights."""
import json
import pickle
import re
import runpy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import PARAM_SCHEDULERS, DefaultScope

pytest.importorskip('mmpretrain.models')
from mmdet.registry import MODELS as DETECTION  # noqa: E402
from mmpretrain.registry import MODELS as CLASSIFICATION  # noqa: E402
from mmpretrain.structures import DataSample  # noqa: E402

from kcla_mm.cli import check_files, load_config, read_config  # noqa: E402
from kcla_mm.configs import config_path  # noqa: E402

COLOURS = dict(blue=(255, 0, 0), green=(0, 255, 0), red=(0, 0, 255))


@pytest.fixture(scope='module')
def trained(run_tool, tmp_path_factory):
    """A folder in which tiny.py was trained for an epoch on images of three colours, and what that printed."""
    folder = tmp_path_factory.mktemp('colours')
    for split, number in (('train', 4), ('val', 3)):
        for name, colour in COLOURS.items():
            (folder / 'data' / split / name).mkdir(parents=True)
            for i in range(number):
                image = np.full((40, 48, 3), colour, np.uint8)
                cv2.circle(image, (10 * i + 8, 20), 8, (255, 255, 255), -1)
                cv2.imwrite(str(folder / 'data' / split / name / f'{i}.png'), image)
    (folder / 'tiny.py').write_text("""
_base_ = 'kcla_mm::resnet50_kcla_in1k.py'
model = dict(backbone=dict(depth=18), head=dict(num_classes=3, in_channels=512, topk=(1, )))
data_preprocessor = dict(num_classes=3)
loading = dict(batch_size=4, num_workers=0)
data = dict(type='CustomDataset', data_root='data')
load = dict(type='LoadImageFromFile')
train_pipeline = [load, dict(type='RandomResizedCrop', scale=32), dict(type='PackInputs')]
val_pipeline = [load, dict(type='Resize', scale=32), dict(type='PackInputs')]
train_dataloader = dict(dataset=dict(_delete_=True, data_prefix='train', pipeline=train_pipeline, **data), **loading)
val_dataloader = dict(dataset=dict(_delete_=True, data_prefix='val', pipeline=val_pipeline, **data), **loading)
test_dataloader = val_dataloader
val_evaluator = dict(topk=(1, ))
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=1)
optim_wrapper = dict(optimizer=dict(lr=0.01))
param_scheduler = []
""")
    return folder, run_tool('train.py', 'tiny.py', cwd=folder)


def load(path):
    return torch.load(path, map_location='cpu', weights_only=False)


def test_a_classifier_trains_and_is_tested(run_tool, trained):
    folder, printed = trained
    assert 'accuracy/top1' in printed
    weights = load(folder / 'work_dirs/tiny/epoch_1.pth')['state_dict']
    scale = weights['backbone.layer4.1.layer_attention.norm.weight']
    assert (scale != 1).any() and scale.isfinite().all(), 'it starts at 1 and learns'

    printed = run_tool('test.py', 'tiny.py', 'work_dirs/tiny/epoch_1.pth', '--out', 'results.pkl',
                       '--show-dir', 'drawn', cwd=folder)
    assert len(list((folder / 'drawn').iterdir())) == 3, 'named as the images, of which three folders have the same'
    results = pickle.loads((folder / 'results.pkl').read_bytes())
    assert len(results) == 9
    right = [bool(result['pred_label'] == result['gt_label']) for result in results]
    assert float(re.search(r'accuracy/top1: ([\d.]+)', printed)[1]) == pytest.approx(100 * np.mean(right), abs=1e-3)

    run_tool('infer.py', 'tiny.py', 'work_dirs/tiny/epoch_1.pth', 'data/val/red/1.png', '--out-dir', 'inferred',
             cwd=folder)
    inferred = json.loads((folder / 'inferred/preds/1.json').read_text())
    tested, = [result for result in results if result['img_path'].endswith('red/1.png')]
    np.testing.assert_allclose(inferred['pred_scores'], tested['pred_score'], rtol=1e-4)
    assert inferred['pred_class'] == sorted(COLOURS)[inferred['pred_label']]
    assert (folder / 'inferred/vis/1.png').exists()


def test_one_option_swaps_the_backbone_of_a_zoo_classifier(run_tool, trained, tmp_path):
    printed = run_tool(
        'train.py', 'mmpretrain::resnet/resnet18_8xb32_in1k.py', '--work-dir', tmp_path, '--cfg-options',
        'model.backbone.type=KCLAResNet', 'train_cfg.max_epochs=1', 'train_dataloader.dataset.pipeline.1.scale=32',
        'val_dataloader.dataset.pipeline.1.scale=32', 'val_dataloader.dataset.pipeline.2.crop_size=32',
        *(f'{part}_dataloader.{option}' for part in ('train', 'val') for option in (
            'num_workers=0', 'dataset.data_root=data', 'dataset.metainfo.classes="blue,green,red"')), cwd=trained[0])
    assert 'accuracy/top5' in printed
    assert 'backbone.layer4.1.layer_attention.value' in load(tmp_path / 'epoch_1.pth')['state_dict']


@pytest.mark.parametrize('config', [
    'kcla_mm::resnet50_kcla_in1k.py', 'kcla_mm::resnet20_kcla_cifar100.py',
    'mmpretrain::resnet/resnet50_8xb256-rsb-a1-600e_in1k.py',
    'mmpretrain::mocov3/mocov3_resnet50_8xb512-amp-coslr-100e_in1k.py',
])
def test_data_is_loaded_as_by_the_tools_of_mmpretrain(tool, monkeypatch, config):
    mmpretrain = Path(find_spec('mmpretrain').origin).parent / '.mim'
    theirs = runpy.run_path(str(mmpretrain / 'tools/train.py'))
    scope, _, name = config.partition('::')
    path = config_path(name) if scope == 'kcla_mm' else str(mmpretrain / 'configs' / name)
    monkeypatch.setattr('sys.argv', ['train.py', path])
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)  # nothing is pinned without a GPU
    expected = theirs['merge_args'](Config.fromfile(path), theirs['parse_args']())
    cfg = load_config(tool('train').parse_args())
    for part in 'train_dataloader', 'val_dataloader', 'test_dataloader':
        assert cfg.get(part) == expected.get(part)


def pretrained(checkpoint):
    return dict(type='Pretrained', checkpoint=str(checkpoint), prefix='backbone.')


def build_detector(checkpoint, depth):
    """Our Faster R-CNN, its backbone's weights from a classifier."""
    options = {'model.backbone.init_cfg': pretrained(checkpoint)}
    if depth == 18:
        options.update({'model.backbone.depth': 18, 'model.neck.in_channels': [64, 128, 256, 512]})
    cfg = read_config('kcla_mm::faster_rcnn_r50_kcla_coco.py', options)
    check_files(cfg, 'model')
    with DefaultScope.overwrite_default_scope('mmdet'):
        detector = DETECTION.build(cfg.model)
    detector.init_weights()
    return detector


def assert_taken_over(backbone, checkpoint):
    """All weights of the classifier's backbone are in this one, which has no others."""
    expected = {name[len('backbone.'):]: value for name, value in load(checkpoint)['state_dict'].items()
                if name.startswith('backbone.')}
    weights = backbone.state_dict()
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []
    assert 'layer2.0.layer_attention.memory_conv' in weights


def test_a_detector_starts_from_the_trained_classifier(trained):
    checkpoint = trained[0] / 'work_dirs/tiny/epoch_1.pth'
    assert_taken_over(build_detector(checkpoint, 18).backbone, checkpoint)


def test_a_segmenter_starts_from_the_trained_classifier(trained):
    pytest.importorskip('mmseg.models')
    from mmseg.registry import MODELS
    checkpoint = trained[0] / 'work_dirs/tiny/epoch_1.pth'
    backbone = MODELS.build(dict(type='KCLAResNet', depth=18, strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4),
                                 init_cfg=pretrained(checkpoint)))
    backbone.init_weights()
    assert_taken_over(backbone, checkpoint)


def test_weights_of_the_imagenet_config_fit_the_detector_config(tmp_path):
    cfg = read_config('kcla_mm::resnet50_kcla_in1k.py')
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        classifier = CLASSIFICATION.build(cfg.model)
    for value in classifier.state_dict().values():
        value.copy_(torch.rand_like(value, dtype=torch.float))
    torch.save(dict(state_dict=classifier.state_dict()), tmp_path / 'resnet50.pth')
    assert_taken_over(build_detector(tmp_path / 'resnet50.pth', 50).backbone, tmp_path / 'resnet50.pth')


@pytest.mark.parametrize('framework, type', [('mmseg', 'KCLAResNetV1c'), ('mmseg', 'KCLAResNetV1d'),
                                             ('mmdet', 'KCLAResNetV1d')])
def test_deep_stems_take_weights_over_although_their_names_differ(tmp_path, framework, type):
    pytest.importorskip(f'{framework}.models')
    classifier = CLASSIFICATION.build(dict(type=type, depth=18))
    for value in classifier.state_dict().values():
        if value.ndim == 1:  # also what starts the same in both
            value.copy_(torch.rand_like(value) + 0.5)
    weights = {f'backbone.{name}': value for name, value in classifier.state_dict().items()}
    torch.save(dict(state_dict=weights), tmp_path / 'resnet18.pth')
    backbone = import_module(f'{framework}.registry').MODELS.build(
        dict(type=type, depth=18, init_cfg=pretrained(tmp_path / 'resnet18.pth')))
    backbone.init_weights()
    assert 'stem.2.conv.weight' in classifier.state_dict() and 'stem.6.weight' in backbone.state_dict()
    classifier.eval(), backbone.eval()
    image = torch.rand(1, 3, 32, 48)
    with torch.no_grad():
        torch.testing.assert_close(backbone(image)[-1], classifier(image)[-1])


@pytest.mark.parametrize('depth', [50, 101])
def test_imagenet_configs_add_attention_and_a_warm_up_to_the_zoo(depth):
    expected = Config.fromstring(f"_base_ = 'mmpretrain::resnet/resnet{depth}_8xb32_in1k.py'", '.py').to_dict()
    cfg = read_config(f'kcla_mm::resnet{depth}_kcla_in1k.py').to_dict()
    expected['model']['backbone'].update(type='KCLAResNet', attention=dict(type='KCLA', init_scale=1.0))
    assert cfg['model'] == expected['model']
    assert all(cfg[name] == expected[name] for name in expected
               if name not in ('model', 'param_scheduler'))
    assert cfg['train_dataloader']['batch_size'] * 8 == cfg['auto_scale_lr']['base_batch_size'] == 256


def learning_rates(cfg, iterations=4):
    """The learning rate of each iteration in each epoch of a config."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=cfg.optim_wrapper.optimizer.lr)
    schedulers = cfg.param_scheduler if isinstance(cfg.param_scheduler, list) else [cfg.param_scheduler]
    schedulers = [PARAM_SCHEDULERS.build(scheduler, default_args=dict(optimizer=optimizer, epoch_length=iterations))
                  for scheduler in schedulers]
    rates = []
    for _ in range(cfg.train_cfg.max_epochs):
        rates.append([])
        for _ in range(iterations):
            rates[-1].append(optimizer.param_groups[0]['lr'])
            optimizer.step()
            [scheduler.step() for scheduler in schedulers if not scheduler.by_epoch]
        [scheduler.step() for scheduler in schedulers if scheduler.by_epoch]
    return np.array(rates)


def test_learning_rates():
    rates = learning_rates(read_config('kcla_mm::resnet101_kcla_in1k.py'))
    assert len(rates) == 100
    np.testing.assert_allclose(rates[:3].flatten(), np.linspace(0.025, 0.1, 12))
    for start, end, rate in ((3, 30, 0.1), (30, 60, 1e-2), (60, 90, 1e-3), (90, 100, 1e-4)):
        np.testing.assert_allclose(rates[start:end], rate)
    rates = learning_rates(read_config('kcla_mm::resnet110_kcla_cifar100.py'))
    assert len(rates) == 300
    for start, end, rate in ((0, 150, 0.1), (150, 225, 1e-2), (225, 300, 1e-3)):
        np.testing.assert_allclose(rates[start:end], rate)


@pytest.mark.parametrize('depth', [20, 56, 110])
def test_cifar_configs(depth):
    cfg = read_config(f'kcla_mm::resnet{depth}_kcla_cifar100.py')
    assert cfg.train_dataloader.batch_size == cfg.auto_scale_lr.base_batch_size == 128
    assert cfg.optim_wrapper.optimizer.momentum == 0.9 and cfg.optim_wrapper.optimizer.weight_decay == 1e-4
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = CLASSIFICATION.build(dict(cfg.model, data_preprocessor=cfg.data_preprocessor))
    assert model.backbone.depth == depth
    layers = [m for m in model.modules() if type(m).__name__ == 'KCLA']
    assert len(layers) == depth // 9 * 3 and {layer.init_scale for layer in layers} == {1.0}
    batch = dict(inputs=torch.randint(256, (2, 3, 32, 32)),
                 data_samples=[DataSample().set_gt_label(label) for label in (0, 99)])
    loss = model(**model.data_preprocessor(batch, training=True), mode='loss')['loss']
    loss.backward()
    assert loss.isfinite() and all(p.grad is not None for p in model.parameters())


def test_missing_data(mistake, trained, tmp_path, monkeypatch):
    message = mistake('train', 'kcla_mm::resnet50_kcla_in1k.py', cwd=tmp_path)
    assert message.startswith('error: data/imagenet/ does not exist')
    message = mistake('train', 'tiny.py', '--cfg-options', 'val_dataloader.dataset.data_prefix=no', cwd=trained[0])
    assert message.startswith('error: data/no does not exist') and 'val_dataloader.dataset.data_prefix' in message

    monkeypatch.chdir(tmp_path)
    cifar = read_config('kcla_mm::resnet20_kcla_cifar100.py')
    check_files(cifar, 'model', 'train_dataloader', 'val_dataloader')  # it downloads itself, unless told
    cifar.train_dataloader.dataset.download = False
    with pytest.raises(FileNotFoundError, match='data/cifar100/ does not exist'):
        check_files(cifar, 'train_dataloader', 'val_dataloader')
