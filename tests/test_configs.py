from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmdet.registry import MODELS

import kcla_mm
from kcla_mm.backbones.mmdet import KCLAResNet

CONFIGS = sorted(path.name for path in Path(kcla_mm.__file__).parents[1].joinpath('configs').glob('*.py'))
COCO_BASES = {
    'faster_rcnn_r50_kcla_coco.py': 'mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py',
    'faster_rcnn_r101_kcla_coco.py': 'mmdet::faster_rcnn/faster-rcnn_r101_fpn_1x_coco.py',
    'mask_rcnn_r50_kcla_coco.py': 'mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py',
    'mask_rcnn_r101_kcla_coco.py': 'mmdet::mask_rcnn/mask-rcnn_r101_fpn_1x_coco.py',
}


def load(name):
    return Config.fromfile(kcla_mm.config_path(name))


@pytest.mark.parametrize('name, base', COCO_BASES.items())
def test_coco_configs_change_the_backbone_and_nothing_else(name, base):
    expected = Config.fromstring(f'_base_ = {base!r}', '.py').to_dict()
    expected['model']['backbone']['type'] = 'KCLAResNet'
    expected['custom_imports'] = dict(imports=['kcla_mm'])
    assert load(name).to_dict() == expected


@pytest.mark.parametrize('name', CONFIGS)
def test_models_build_with_attention_in_every_block(name):
    config = load(name)
    with DefaultScope.overwrite_default_scope(config.default_scope):
        model = MODELS.build(config.model)
    assert isinstance(model.backbone, KCLAResNet)
    blocks = [block for layer in model.backbone.res_layers for block in getattr(model.backbone, layer)]
    assert len(blocks) == {18: 8, 50: 16, 101: 33}[config.model.backbone.depth]
    assert all(hasattr(block, 'layer_attention') for block in blocks)


def test_all_of_the_demo_model_learns():
    config = load('faster_rcnn_r18_kcla_shapes.py')
    with DefaultScope.overwrite_default_scope(config.default_scope):
        model = MODELS.build(config.model)
    assert all(parameter.requires_grad for parameter in model.train().parameters())
    assert all(module.training for module in model.modules())
