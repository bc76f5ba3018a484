"""The UNet decoder, alone and in the segmenter of the configs."""
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample
from torch.nn.functional import interpolate

import kcla_mm
from kcla_mm.segmentation import UNetHead

BCE_DICE = dict(type='BCEDiceLoss')
ONE_MAP = dict(num_classes=2, out_channels=1, threshold=0.5, loss_decode=BCE_DICE)


def features(channels, sizes):
    return [torch.randn(2, c, *size) for c, size in zip(channels, sizes)]


def samples(labels):
    return [SegDataSample(gt_sem_seg=PixelData(data=label[None])) for label in labels]


def gradients_reach_all(network):
    return not [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize('height, width', [(32, 48), (37, 51)])
def test_maps_of_the_light_encoder(height, width):
    encoder = MODELS.build(dict(type='KCLAResNetUNet', attention=dict(type='KCLA', init_scale=1.0, drop_path=0.)))
    head = UNetHead([16, 32, 64, 128, 128], **ONE_MAP)
    logits = head(encoder(torch.rand(2, 3, height, width)))
    assert logits.shape == (2, 1, height, width)
    losses = head.loss_by_feat(logits, samples(torch.randint(0, 2, (2, height, width))))
    assert set(losses) == {'loss_bce_dice', 'acc_seg'}
    losses['loss_bce_dice'].backward()
    assert gradients_reach_all(head) and gradients_reach_all(encoder)


def test_maps_of_a_resnet_50():
    backbone = MODELS.build(dict(type='KCLAResNet', depth=50, attention=None))
    head = UNetHead([256, 512, 1024, 2048], decoder_channels=[8, 16, 24], **ONE_MAP)
    maps = backbone(torch.rand(2, 3, 45, 67))
    assert [map.shape[2:] for map in maps] == [(12, 17), (6, 9), (3, 5), (2, 3)]
    assert head(maps).shape == (2, 1, 12, 17)
    assert [block[1].conv.out_channels for block in head.blocks] == [8, 16, 24]
    assert [block[0].conv.in_channels for block in head.blocks] == [256 + 16, 512 + 24, 1024 + 2048]


def test_it_decodes_as_a_unet_does():
    """Against the same convolutions, called one by one."""
    torch.manual_seed(0)
    head = UNetHead([4, 6, 8], decoder_channels=[5, 7], norm_cfg=None, act_cfg=None, dropout_ratio=0, **ONE_MAP)
    high, middle, deep = features([4, 6, 8], [(9, 12), (5, 6), (3, 3)])
    (first, second), (third, fourth) = [[module.conv for module in block] for block in head.blocks]
    x = torch.cat([middle, interpolate(deep, (5, 6), mode='bilinear')], 1)
    x = fourth(third(x))
    x = torch.cat([high, interpolate(x, (9, 12), mode='bilinear')], 1)
    expected = head.conv_seg(second(first(x)))
    torch.testing.assert_close(head([high, middle, deep]), expected)


def test_the_feature_maps_can_be_chosen():
    chosen, all_of_them = UNetHead([4, 8], in_index=[1, 3], **ONE_MAP).eval(), UNetHead([4, 8], **ONE_MAP).eval()
    all_of_them.load_state_dict(chosen.state_dict())
    maps = features([3, 4, 5, 8], [(9, 9), (8, 8), (7, 7), (3, 3)])
    assert torch.equal(chosen(maps), all_of_them([maps[1], maps[3]]))


def test_two_maps_for_two_classes():
    head = UNetHead([4, 8], num_classes=2, out_channels=2, loss_decode=dict(type='CrossEntropyLoss'))
    logits = head(features([4, 8], [(8, 8), (4, 4)]))
    assert logits.shape == (2, 2, 8, 8)
    labels = torch.randint(0, 2, (2, 8, 8))
    losses = head.loss_by_feat(logits, samples(labels))
    assert losses['acc_seg'].item() == pytest.approx(100 * (logits.argmax(1) == labels).double().mean().item())
    losses['loss_ce'].backward()
    assert gradients_reach_all(head)


@pytest.mark.parametrize('threshold', [0.5, 0.2])
def test_the_accuracy_that_is_logged_of_one_map(threshold):
    torch.manual_seed(0)
    head = UNetHead([4, 8], **{**ONE_MAP, 'threshold': threshold})
    logits, labels = torch.randn(2, 1, 5, 6), torch.randint(0, 2, (2, 10, 12))
    labels[0, :3] = 255
    found = interpolate(logits, (10, 12), mode='bilinear').sigmoid()[:, 0] > threshold
    right = (found == (labels == 1))[labels != 255]
    accuracy = head.loss_by_feat(logits, samples(labels))['acc_seg'].item()
    assert accuracy == pytest.approx(100 * right.double().mean().item(), rel=1e-5)


@pytest.mark.parametrize('arguments, message', [
    (dict(in_channels=[4]), r'in_channels must be a list of at least two numbers, got \[4\]'),
    (dict(in_channels=4), 'in_channels must be a list of at least two numbers, got 4'),
    (dict(decoder_channels=[4, 8]), r'decoder_channels must have 1 numbers, one less than .*, got \[4, 8\]'),
    (dict(decoder_channels=4), r'decoder_channels must have 1 numbers, .*\[4, 8\], got 4'),
    (dict(in_index=[0, 1, 2]), r'in_index must have 2 numbers, as in_channels=\[4, 8\], got \[0, 1, 2\]'),
    (dict(in_index=0), 'in_index must have 2 numbers, .* got 0'),
    (dict(threshold=1.), 'threshold must be between 0 and 1, got 1.0'),
    (dict(threshold=0), 'threshold must be between 0 and 1, got 0'),
])
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        UNetHead(**{'in_channels': [4, 8], **ONE_MAP, **arguments})


@pytest.fixture(scope='module')
def config():
    return Config.fromfile(kcla_mm.config_path('unet_kcla_kvasir.py'))


@pytest.fixture
def segmenter(config):
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(config.model)
        model.init_weights()
        yield model


def test_the_segmenter_of_the_config_trains(segmenter):
    optimizer = torch.optim.AdamW(segmenter.parameters(), 1e-2)
    images = [torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8) for _ in range(2)]
    labels = [(image[0] > 128).long() for image in images]
    segmenter.train()
    losses = []
    for step in range(4):
        data = segmenter.data_preprocessor(dict(inputs=images, data_samples=samples(labels)), training=True)
        loss, log = segmenter.parse_losses(segmenter(**data, mode='loss'))
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            assert set(log) == {'loss', 'decode.loss_bce_dice', 'decode.acc_seg'}
            assert not [name for name, p in segmenter.named_parameters() if p.grad is None]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_the_segmenter_predicts_at_the_images_own_size(segmenter):
    sample = SegDataSample(gt_sem_seg=PixelData(data=torch.zeros(1, 45, 61).long()))
    sample.set_metainfo(dict(ori_shape=(45, 61), img_shape=(32, 32)))
    image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    segmenter.eval()
    torch.nn.init.normal_(segmenter.decode_head.conv_seg.weight)
    with torch.no_grad():
        prediction = segmenter.test_step(dict(inputs=[image], data_samples=[sample]))[0].pred_sem_seg.data
        pixels = (image.flip(0) - segmenter.data_preprocessor.mean) / segmenter.data_preprocessor.std  # BGR to RGB
        logits = segmenter(pixels[None], mode='tensor')
    expected = interpolate(logits, (45, 61), mode='bilinear')[0].sigmoid() > 0.5
    assert prediction.shape == (1, 45, 61)
    assert torch.equal(prediction.bool(), expected)
    assert expected.any() and not expected.all()


@pytest.mark.parametrize('arguments, sizes, message', [
    (dict(), [(4, 8), (9, 4)], r'in_channels=\[4, 8\], in_index=\[0, 1\] .* do not fit .* have \[4, 9\] channels'),
    (dict(), [(4, 8)], r'have \[4\] channels'),
    (dict(), [(4, 8), (8, 4), (16, 2)], r'have \[4, 8, 16\] channels'),
    (dict(in_index=[0, 3]), [(4, 8), (8, 4)], r'in_index=\[0, 3\] .* do not fit'),
    (dict(), [(4, 4), (8, 8)], r'from the largest feature map to the smallest, got maps of \[\(4, 4\), \(8, 8\)\]'),
])
def test_feature_maps_that_do_not_fit(arguments, sizes, message):
    head = UNetHead(**{'in_channels': [4, 8], **ONE_MAP, **arguments})
    with pytest.raises(ValueError, match=message):
        head([torch.rand(1, channels, size, size) for channels, size in sizes])
