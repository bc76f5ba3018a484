import os
import signal
import subprocess
import sys

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
    'strong_baselines/mask-rcnn_r50_fpn_rpn-2conv_4conv1fc_syncbn-all_lsj-50e_coco.py',
    'tood/tood_r50_fpn_1x_coco.py',
]
SMALLEST = 'retinanet/retinanet_r18_fpn_1x_coco.py'
SEGMENTATION_SPREAD = [
    'bisenetv1/bisenetv1_r18-d32_4xb4-160k_coco-stuff164k-512x512.py',
    'ccnet/ccnet_r50-d8_4xb4-20k_voc12aug-512x512.py',
    'danet/danet_r50-d8_4xb2-40k_cityscapes-769x769.py',
    'deeplabv3plus/deeplabv3plus_r18b-d8_4xb2-80k_cityscapes-769x769.py',
    'dmnet/dmnet_r50-d8_4xb4-80k_ade20k-512x512.py',
    'encnet/encnet_r50-d8_4xb2-40k_cityscapes-512x1024.py',
    'fastfcn/fastfcn_r50-d32_jpu_psp_4xb2-80k_cityscapes-512x1024.py',
    'fcn/fcn-d6_r50-d16_4xb2-40k_cityscapes-512x1024.py',
    'gcnet/gcnet_r50-d8_4xb2-40k_cityscapes-512x1024.py',
    'isanet/isanet_r50-d8_4xb4-20k_voc12aug-512x512.py',
    'knet/knet-s3_r50-d8_fcn_8xb2-adamw-80k_ade20k-512x512.py',
    'mask2former/mask2former_r50_8xb2-90k_cityscapes-512x1024.py',
    'maskformer/maskformer_r50-d32_8xb2-160k_ade20k-512x512.py',
    'ocrnet/ocrnet_r101-d8_4xb2-40k_cityscapes-512x1024.py',
    'point_rend/pointrend_r50_4xb2-80k_cityscapes-512x1024.py',
    'pspnet/pspnet_r18-d8_4xb4-80k_potsdam-512x512.py',
    'resnest/resnest_s101-d8_fcn_4xb2-80k_cityscapes-512x1024.py',
    'sem_fpn/fpn_r50_4xb2-80k_cityscapes-512x1024.py',
    'upernet/upernet_r18_4xb4-20k_voc12aug-512x512.py',
]
PRETRAINING_SPREAD = [
    'barlowtwins/benchmarks/resnet50_8xb32-linear-coslr-100e_in1k.py',
    'byol/benchmarks/mask-rcnn_r50_fpn_ms-1x_coco.py',
    'byol/byol_resnet50_16xb256-coslr-200e_in1k.py',
    'csra/resnet101-csra_1xb16_voc07-448px.py',
    'mocov2/mocov2_resnet50_8xb32-coslr-200e_in1k.py',
    'resnet/resnet18_8xb32_in1k.py',
    'resnet/resnet50_8xb256-rsb-a1-600e_in1k.py',
    'resnet/resnetv1c50_8xb32_in1k.py',
    'resnet/resnetv1d50_8xb32_in1k.py',
    'resnext/resnext50-32x4d_8xb32_in1k.py',
    'seresnet/seresnet50_8xb32_in1k.py',
    'simclr/simclr_resnet50_8xb32-coslr-200e_in1k.py',
    'swav/swav_resnet50_8xb32-mcrop-coslr-200e_in1k-224px-96px.py',
]


@pytest.fixture
def swap_backbones(tool, monkeypatch):
    module = tool('swap_backbones')
    module.load('mmdet')
    monkeypatch.chdir(module.folder('mmdet'))
    return module


@pytest.fixture
def mmseg():
    return pytest.importorskip('mmseg.models')


@pytest.mark.parametrize('name', SPREAD)
def test_detectors_of_the_zoo_train_with_their_backbones_swapped(swap_backbones, name):
    assert swap_backbones.check(name, size=64) == ('ok', '')


@pytest.mark.parametrize('name', SEGMENTATION_SPREAD)
def test_segmentors_of_the_zoo_train_with_their_backbones_swapped(swap_backbones, mmseg, name):
    assert swap_backbones.check(name, size=64, zoo='mmseg') == ('ok', '')


@pytest.mark.parametrize('name', PRETRAINING_SPREAD)
def test_classifiers_and_what_learns_without_classes_train_with_their_backbones_swapped(swap_backbones, name):
    pytest.importorskip('mmpretrain.models')
    assert swap_backbones.check(name, size=32, zoo='mmpretrain') == ('ok', '')


def test_cifar_networks_of_mmpretrain_are_left_out(swap_backbones):
    pytest.importorskip('mmpretrain.models')
    assert not swap_backbones.has_backbone('resnet/resnet18_8xb16_cifar10.py', 'mmpretrain')
    assert swap_backbones.has_backbone('resnet/resnet18_8xb32_in1k.py', 'mmpretrain')


def test_a_segmentor_that_runs_stages_by_hand_is_refused(swap_backbones, mmseg):
    result, reason = swap_backbones.check('icnet/icnet_r18-d8_4xb2-80k_cityscapes-832x832.py', size=64, zoo='mmseg')
    assert (result, reason) == ('refused', 'cannot work: runs the stages of its backbone by hand')


def test_a_detector_that_fails_anyway_is_skipped(swap_backbones, monkeypatch):
    def no_batch(model, size):
        raise RuntimeError('no data')
    zoo = swap_backbones.ZOOS['mmdet']
    monkeypatch.setitem(swap_backbones.ZOOS, 'mmdet', zoo._replace(random_batch=no_batch))
    result, reason = swap_backbones.check(SMALLEST, size=64)
    assert result == 'skipped' and reason.startswith('fails without the swap too: RuntimeError: no data (test_swap_')


def swap_to(monkeypatch, swap_backbones, **backbone):
    monkeypatch.setattr(swap_backbones, 'swap', lambda model, families: model.backbone.update(backbone))


def test_a_detector_that_only_fails_swapped_has_failed(swap_backbones, monkeypatch):
    swap_to(monkeypatch, swap_backbones, type='KCLAResNet', attention=dict(type='Unknown'))
    result, reason = swap_backbones.check(SMALLEST, size=64)
    assert result == 'failed' and 'attention type must be one of [' in reason


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


def test_command_for_segmentation_without_mmdet(swap_backbones, mmseg, tmp_path):
    code = """
import runpy, sys
sys.modules.update(dict.fromkeys(['mmdet', 'mmpretrain']))
runpy.run_path(sys.argv[1], run_name='__main__')
"""
    patterns = 'pspnet/pspnet_r18-d8_4xb4-80k_potsdam*', 'icnet/icnet_r18-d8_4xb2-80k*', 'mask2former/*r50*ade20k*'
    command = [sys.executable, '-c', code, swap_backbones.__file__, *patterns, '--zoo', 'mmseg', '--size', '64']
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, 'a refusal is not a failure:\n' + done.stdout
    assert 'passing over mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py, which cannot be read' in done.stdout
    assert '\n1 ok, 0 failed, 0 skipped, 1 refused\n' in done.stdout


def test_a_framework_that_is_not_installed(mistake, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'mmseg', None)
    assert 'error: kcla_mm needs mmseg>=1.1.0' in mistake('swap_backbones', '--zoo', 'mmseg', cwd=tmp_path)


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
