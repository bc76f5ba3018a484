from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, PARAM_SCHEDULERS, DefaultScope

import kcla_mm
from kcla_mm.backbones import LayerAttentionMixin
from kcla_mm.layer_attention import KCLA

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


def build(config):
    with DefaultScope.overwrite_default_scope(config.default_scope):
        return MODELS.build(config.model)


@pytest.mark.parametrize('name', [name for name in CONFIGS if '_resnet_' not in name])
def test_models_build_with_attention_in_every_block(name):
    backbone = build(load(name)).backbone
    assert isinstance(backbone, LayerAttentionMixin)
    blocks = [block for layer in backbone.res_layers for block in getattr(backbone, layer)]
    assert len(blocks) == sum(backbone.stage_blocks)
    assert all(isinstance(block.layer_attention, KCLA) for block in blocks)


TWINS = [name for name in CONFIGS if '_resnet_' in name]


@pytest.mark.parametrize('name', TWINS)
def test_plain_twins_differ_in_the_attention_and_nothing_else(name):
    twin, config = load(name).to_dict(), load(name.replace('_resnet_', '_kcla_')).to_dict()
    assert twin['model']['backbone'].pop('attention') is None
    assert config['model']['backbone'].pop('attention')['type'] == 'KCLA'
    assert twin == config


def test_there_are_twins():
    assert len(TWINS) >= 3


@pytest.mark.parametrize('name', ['unet_kcla_kvasir.py', 'unet_kcla_isic2017.py', 'unet_kcla_isic2018.py'])
def test_lesion_configs_train_as_the_paper_does(name):
    config = load(name)
    assert config.train_cfg.max_epochs == 300 and config.train_dataloader.batch_size == 8
    assert config.optim_wrapper.optimizer == dict(type='AdamW', lr=1e-3, weight_decay=1e-2)
    rates = []
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = PARAM_SCHEDULERS.build(config.param_scheduler, default_args=dict(optimizer=optimizer))
    for _ in range(300):
        rates.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        scheduler.step()
    assert max(rates) == rates[0] == 1e-3
    assert min(rates) == pytest.approx(1e-5) == rates[50]
    assert rates[25] == pytest.approx((1e-3 + 1e-5) / 2)


def test_all_of_the_demo_model_learns():
    model = build(load('faster_rcnn_r18_kcla_shapes.py'))
    assert all(parameter.requires_grad for parameter in model.train().parameters())
    assert all(module.training for module in model.modules())
