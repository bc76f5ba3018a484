"""Exported models do in ONNX Runtime what they do in PyTorch, for images of any number and size."""
from importlib import import_module

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from kcla_mm.backbones import FRAMEWORKS
from kcla_mm.layer_attention import LAYER_ATTENTIONS

pytest.importorskip('onnx', reason='onnx is not installed')
onnxruntime = pytest.importorskip('onnxruntime', reason='onnxruntime is not installed')
needs = {name: pytest.mark.skipif(name not in FRAMEWORKS, reason=f'{name} is not installed') for name in
         ('mmdet', 'mmseg', 'mmpretrain')}


def saved(folder, text):
    """A model of a config, of random weights and normalisation statistics, with config.py and weights.pth in a folder."""
    (folder / 'config.py').write_text(text)
    cfg = Config.fromfile(folder / 'config.py')
    cfg.model.setdefault('data_preprocessor', cfg.get('data_preprocessor'))
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        import_module(f'{cfg.default_scope}.utils').register_all_modules(init_default_scope=False)
        model = MODELS.build(cfg.model)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1)
    torch.save(model.state_dict(), folder / 'weights.pth')
    model.eval()
    return model


def run(path, images):
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, {'image': images})))


@needs['mmseg']
def test_segmenter(run_tool, tmp_path):
    from mmseg.structures import SegDataSample
    model = saved(tmp_path, "_base_ = 'kcla_mm::unet_kcla_lesions.py'")
    printed = run_tool('export_onnx.py', 'config.py', 'weights.pth', '--out', 'out/unet.onnx', cwd=tmp_path)
    assert 'logits' in printed and 'Wrote out/unet.onnx' in printed
    image = np.random.randint(0, 256, (3, 70, 90), np.uint8)  # blue, green, red
    sample = SegDataSample(metainfo=dict(img_shape=(70, 90), ori_shape=(70, 90), pad_shape=(70, 90)))
    tested = model.test_step(dict(inputs=[torch.from_numpy(image)], data_samples=[sample]))[0]
    logits = run(tmp_path / 'out/unet.onnx', image[None].astype(np.float32))['logits']
    assert logits.shape == (1, 1, 70, 90)
    np.testing.assert_allclose(1 / (1 + np.exp(-logits[0])), tested.seg_logits.data.detach().numpy(), atol=1e-4)


@needs['mmpretrain']
def test_classifier(run_tool, tmp_path):
    model = saved(tmp_path, "_base_ = 'kcla_mm::resnet20_kcla_cifar100.py'")
    run_tool('export_onnx.py', 'config.py', 'weights.pth', '--out', 'net.onnx', cwd=tmp_path)
    images = np.random.randint(0, 256, (3, 3, 32, 32), np.uint8)
    tested = model.test_step(dict(inputs=torch.from_numpy(images)))
    scores = run(tmp_path / 'net.onnx', images.astype(np.float32))['scores']
    np.testing.assert_allclose(scores, torch.stack([sample.pred_score for sample in tested]).detach().numpy(), atol=1e-4)


@needs['mmdet']
@pytest.mark.parametrize('base, outputs', [
    ('kcla_mm::faster_rcnn_r18_kcla_shapes.py', [f'feature{i}' for i in range(5)]),
    ('mmdet::retinanet/retinanet_r18_fpn_1x_coco.py', [f'head{i}_level{j}' for i in range(2) for j in range(5)])])
def test_detector(run_tool, tmp_path, base, outputs):
    model = saved(tmp_path, f"""
_base_ = '{base}'
custom_imports = dict(imports=['kcla_mm'])
model = dict(backbone=dict(type='KCLAResNet', init_cfg=None))
""")
    run_tool('export_onnx.py', 'config.py', 'weights.pth', '--out', 'net.onnx', cwd=tmp_path)
    image = np.random.randint(0, 256, (3, 64, 96), np.uint8)
    batch = model.data_preprocessor(dict(inputs=[torch.from_numpy(image)], data_samples=None))['inputs']
    with torch.no_grad():
        features = model.extract_feat(batch) if outputs[0] == 'feature0' else sum(model(batch, mode='tensor'), [])
    found = run(tmp_path / 'net.onnx', image[None].astype(np.float32))
    assert list(found) == outputs
    for name, expected in zip(outputs, features):
        np.testing.assert_allclose(found[name], expected.numpy(), rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


class Features(nn.Module):
    """A backbone with named outputs."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, image):
        return {f'feature{i}': feature for i, feature in enumerate(self.backbone(image / 255))}


@needs['mmdet']
@pytest.mark.parametrize('type', LAYER_ATTENTIONS)
def test_every_layer_attention(tool, tmp_path, type):
    backbone = MODELS.build(dict(type='mmdet.KCLAResNet', depth=18, base_channels=32, init_cfg=None,
                                 attention=dict(type=type, head_channels=16, init_scale=0.01)))
    differences = tool('export_onnx').export(Features(backbone), str(tmp_path / 'net.onnx'))
    assert list(differences) == [f'feature{i}' for i in range(4)] and max(differences.values()) < 1e-4
    images = torch.rand(1, 3, 50, 33) * 255
    with torch.no_grad():
        expected = backbone(images / 255)
    for feature, found in zip(expected, run(tmp_path / 'net.onnx', images.numpy()).values()):
        torch.testing.assert_close(torch.from_numpy(found), feature, rtol=1e-3, atol=1e-3)


class OfAFixedSize(nn.Module):
    def forward(self, image):
        return {'map': image.reshape(image.shape[0], 3, 96 * 128).sum(1) if image.shape[2] == 96
                else image.flatten(2).sum(1)}


def test_a_file_that_fails_is_not_kept(tool, tmp_path):
    (tmp_path / 'net.onnx').write_text('an earlier export')
    with pytest.raises(Exception):
        tool('export_onnx').export(OfAFixedSize(), str(tmp_path / 'net.onnx'))
    assert [path.name for path in tmp_path.iterdir()] == ['net.onnx']
    assert (tmp_path / 'net.onnx').read_text() == 'an earlier export'


@needs['mmseg']
def test_mistakes(mistake, tmp_path):
    config = tmp_path / 'config.py'
    config.write_text("_base_ = 'kcla_mm::unet_kcla_lesions.py'")
    torch.save({'state_dict': {'backbone.conv1.weight': torch.zeros(1)}}, tmp_path / 'other.pth')
    (tmp_path / 'text.pth').write_text('no checkpoint')
    for checkpoint, out, message in (
            ('missing.pth', 'net.onnx', 'missing.pth'),
            ('other.pth', 'net', '--out must end in .onnx, got net'),
            ('other.pth', 'net.onnx', 'the checkpoint other.pth '),
            ('text.pth', 'net.onnx', 'the checkpoint text.pth cannot be loaded')):
        assert message in mistake('export_onnx', config, checkpoint, '--out', out, cwd=tmp_path)
    assert not (tmp_path / 'net.onnx').exists()
