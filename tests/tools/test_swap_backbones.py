import os
import signal

import pytest
from mmdet.registry import MODELS
from torch import nn

from kcla_mm.backbones.mmdet import KCLAResNet

SPREAD = [
    'atss/atss_r50_fpn_1x_coco.py',
    'cascade_rcnn/cascade-rcnn_r101-caffe_fpn_1x_coco.py',
    'centernet/centernet_r18_8xb16-crop512-140e_coco.py',
    'dcnv2/faster-rcnn_r50-mdconv-c3-c5_fpn_1x_coco.py',
    'deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
    'detr/detr_r50_8xb2-150e_coco.py',
    'dino/dino-4scale_r50_8xb2-12e_coco.py',
    'faster_rcnn/faster-rcnn_r50-caffe_c4-1x_coco.py',
    'faster_rcnn/faster-rcnn_r50-caffe-dc5_1x_coco.py',
    'fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py',
    'gcnet/mask-rcnn_r50-syncbn-gcb-r16-c3-c5_fpn_1x_coco.py',
    'gfl/gfl_x101-32x4d_fpn_ms-2x_coco.py',
    'gn/mask-rcnn_r50_fpn_gn-all_2x_coco.py',
    'mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py',
    'panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py',
    'regnet/faster-rcnn_regnetx-3.2GF_fpn_1x_coco.py',
    'res2net/faster-rcnn_res2net-101_fpn_2x_coco.py',
    'resnest/faster-rcnn_s50_fpn_syncbn-backbone+head_ms-range-1x_coco.py',
    'retinanet/retinanet_r18_fpn_1x_coco.py',
    'solov2/solov2_r50_fpn_1x_coco.py',
]
SMALLEST = 'retinanet/retinanet_r18_fpn_1x_coco.py'


@pytest.fixture
def swap_backbones(tool, monkeypatch):
    module = tool('swap_backbones')
    monkeypatch.chdir(module.ZOO)
    return module


@pytest.mark.parametrize('name', SPREAD)
def test_detectors_of_the_zoo_train_with_their_backbones_swapped(swap_backbones, name):
    assert swap_backbones.check(name, size=64) == ('ok', '')


def test_a_detector_that_fails_anyway_is_skipped(swap_backbones, monkeypatch):
    def no_batch(model, size):
        raise RuntimeError('no data')
    monkeypatch.setattr(swap_backbones, 'random_batch', no_batch)
    result, reason = swap_backbones.check(SMALLEST, size=64)
    assert result == 'skipped' and reason.startswith('fails without the swap too: RuntimeError: no data (test_swap_')


def swap_to(monkeypatch, swap_backbones, **backbone):
    monkeypatch.setattr(swap_backbones, 'swap', lambda model: model.backbone.update(backbone))


def test_a_detector_that_only_fails_swapped_has_failed(swap_backbones, monkeypatch):
    swap_to(monkeypatch, swap_backbones, type='KCLAResNet', attention=dict(type='Unknown'))
    result, reason = swap_backbones.check(SMALLEST, size=64)
    assert result == 'failed' and "attention type must be one of ['KCLA'" in reason


def test_a_parameter_that_never_learns_is_a_failure(swap_backbones, monkeypatch):
    @MODELS.register_module(force=True)
    class Unused(KCLAResNet):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.layer2[1].unused = nn.Linear(1, 1, bias=False)

    swap_to(monkeypatch, swap_backbones, type='Unused')
    result, reason = swap_backbones.check(SMALLEST, size=64)
    assert (result, reason) == ('failed', 'without gradient: backbone.layer2.1.unused.weight')


def test_a_crash_ends_one_config_only(swap_backbones):
    assert swap_backbones.run_apart(os._exit, 3) == ('failed', 'its process ended with exit code 3')
    assert swap_backbones.run_apart(lambda: os.kill(os.getpid(), signal.SIGKILL)) == \
        ('failed', 'its process ended with exit code -9, killed for lack of memory?')


def test_command(run_tool, tmp_path):
    printed = run_tool('swap_backbones.py', SMALLEST, 'retinanet/*tta.py', 'swin/*', '--size', 64, cwd=tmp_path)
    assert f'[1/1, ... min left] ok      {SMALLEST}\n1 ok, 0 failed, 0 skipped\n' in printed


def test_list_is_spread_evenly(swap_backbones, monkeypatch, capsys):
    def listed(*args):
        monkeypatch.setattr('sys.argv', ['swap_backbones.py', 'retinanet/*', '--list', *args])
        swap_backbones.main()
        return capsys.readouterr().out.splitlines()[2:]

    every = listed()
    assert SMALLEST in every and 'retinanet/retinanet_tta.py' not in every
    assert listed('--limit', '4') == [every[i * len(every) // 4] for i in range(4)]


def test_pattern_without_a_match(mistake, tmp_path):
    assert "matches nothing/*" in mistake('swap_backbones', 'nothing/*', cwd=tmp_path)
