"""BCEDiceLoss against its formula, written out pixel by pixel."""
import math

import pytest
import torch
from mmseg.registry import MODELS

from kcla_mm.segmentation import BCEDiceLoss


def plainly(logits, target, weights=None, bce_weight=1., dice_weight=1.):
    """The loss of lists of numbers; pixels of target 255 are ignored."""
    entropy, pixels, dice = 0., 0, 0.
    for n, (image, labels) in enumerate(zip(logits.tolist(), target.tolist())):
        overlap = total = 0.
        for i, row in enumerate(labels):
            for j, label in enumerate(row):
                if label == 255:
                    continue
                weight = 1. if weights is None else weights[n][i][j].item()
                p = 1 / (1 + math.exp(-image[0][i][j]))
                entropy -= weight * math.log(p if label == 1 else 1 - p)
                pixels += 1
                overlap += weight * p * label
                total += weight * (p + label)
        dice += 1 - (2 * overlap + 1) / (total + 1)
    return bce_weight * entropy / max(pixels, 1) + dice_weight * dice / len(logits)


@pytest.fixture
def logits():
    return torch.randn(3, 1, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.fixture
def target():
    target = torch.randint(0, 2, (3, 4, 5), generator=torch.Generator().manual_seed(1))
    target[0, 1:3, 2:] = 255
    target[2] = 0
    return target


@pytest.mark.parametrize('weights', [dict(), dict(bce_weight=0.3, dice_weight=2.), dict(dice_weight=0.)])
def test_it_is_the_formula(logits, target, weights):
    loss = BCEDiceLoss(**weights)(logits, target)
    assert loss.shape == () and loss.item() == pytest.approx(plainly(logits, target, **weights), rel=1e-12)


def test_pixels_can_be_weighted(logits, target):
    weight = torch.rand(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 3
    assert BCEDiceLoss()(logits, target, weight=weight).item() == pytest.approx(plainly(logits, target, weight))


def test_a_weighted_loss_is_never_negative(target):
    perfect = torch.where(target == 1, 50., -50.)[:, None]
    assert BCEDiceLoss()(perfect, target, weight=torch.full(target.shape, 4.)).item() == pytest.approx(0, abs=1e-6)


def test_ignored_pixels_neither_count_nor_learn(logits, target):
    loss = BCEDiceLoss()
    loss(logits, target).backward()
    ignored = (target == 255)[:, None]
    assert (logits.grad[ignored] == 0).all() and (logits.grad[~ignored] != 0).all()
    other = torch.where(ignored, 1e4, logits)
    assert loss(other, target).item() == loss(logits, target).item()


def test_another_label_can_be_ignored_or_none(logits, target):
    loss = BCEDiceLoss()
    seven = torch.where(target == 255, 7, target)
    assert loss(logits, seven, ignore_index=7).item() == loss(logits, target).item()
    none = target % 255
    assert loss(logits, none, ignore_index=None).item() == pytest.approx(plainly(logits, none))


def test_all_ignored(logits):
    loss = BCEDiceLoss()(logits, torch.full((3, 4, 5), 255))
    loss.backward()
    assert loss.item() == 0 and (logits.grad == 0).all()


def test_an_empty_mask_predicted_empty_has_no_loss():
    assert BCEDiceLoss()(torch.full((2, 1, 4, 4), -50.), torch.zeros(2, 4, 4).long()).item() == pytest.approx(0)


def test_gradients(logits, target):
    assert torch.autograd.gradcheck(lambda x: BCEDiceLoss()(x, target), logits)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    """A mean over 40,000 pixels and a sum of them, both out of float16's reach, and logits that saturate."""
    target = torch.zeros(1, 200, 200).long()
    target[:, :100] = 1
    logits = torch.full((1, 1, 200, 200), -1e4, dtype=dtype)
    logits[..., 0, :] = 1e4
    logits.requires_grad_()
    loss = BCEDiceLoss()(logits, target)
    loss.backward()
    big = float(torch.tensor(1e4, dtype=dtype))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(big * 99 / 200 + 1 - (2 * 200 + 1) / (200 + 20000 + 1), rel=1e-3)
    assert logits.grad.isfinite().all()


def test_autocast(logits, target):
    weight = torch.nn.Parameter(torch.ones(1, 1, 1, 1))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        half = torch.nn.functional.conv2d(logits.float(), weight)
        assert half.dtype == torch.bfloat16
        loss = BCEDiceLoss()(half, target)
    loss.backward()
    assert loss.item() == pytest.approx(plainly(half.detach().double(), target), rel=1e-5)
    assert weight.grad.isfinite().all()


def test_it_is_for_one_logit_map(target):
    with pytest.raises(ValueError, match='BCEDiceLoss needs one logit map, out_channels=1, got 2'):
        BCEDiceLoss()(torch.zeros(3, 2, 4, 5), target)


@pytest.mark.parametrize('name', ['bce_weight', 'dice_weight'])
def test_weights_are_not_negative(name):
    with pytest.raises(ValueError, match=f'{name} must not be negative, got -1'):
        BCEDiceLoss(**{name: -1})


def test_the_registry_builds_it_with_a_name_in_the_log():
    assert MODELS.build(dict(type='BCEDiceLoss', loss_name='loss_lesion')).loss_name == 'loss_lesion'
