"""A loss for one logit map that tells lesions from background."""
import torch
import torch.nn.functional as F
from mmseg.registry import MODELS
from torch import nn

SMOOTH = 1.  # added to numerator and denominator of Dice: an empty mask that is predicted empty has no loss


@MODELS.register_module()
class BCEDiceLoss(nn.Module):
    """Binary cross-entropy + soft Dice, arXiv 1606.04797, for heads with ``out_channels=1``.

    With p = sigmoid(logit), the target t, and sums over the pixels of an image that are not ignored:

    .. code-block:: none

        BCE  = mean over all pixels of -(t log p + (1 - t) log(1 - p))
        Dice = mean over images of 1 - (2 sum(p t) + 1) / (sum(p) + sum(t) + 1)
        loss = bce_weight * BCE + dice_weight * Dice

    It is computed in float32 at least.

    Args:
        bce_weight (float): Defaults to 1.0.
        dice_weight (float): Defaults to 1.0.
        loss_name (str): Name in the log; has to begin with 'loss_'. Defaults to 'loss_bce_dice'.

    Raises:
        ValueError: If a weight is negative.
    """

    def __init__(self, bce_weight=1., dice_weight=1., loss_name='loss_bce_dice'):
        super().__init__()
        for name, value in (('bce_weight', bce_weight), ('dice_weight', dice_weight)):
            if value < 0:
                raise ValueError(f'{name} must not be negative, got {value}')
        self.bce_weight = bce_weight
        self.dice_weight = dice_weight
        self.loss_name = loss_name

    def forward(self, logits, target, weight=None, ignore_index=255, **kwargs):
        """The loss of a batch.

        Args:
            logits (Tensor): (N, 1, H, W).
            target (Tensor): Labels 0, 1 and ``ignore_index``, (N, H, W).
            weight (Tensor, optional): Weights of the pixels, (N, H, W). Defaults to None.
            ignore_index (int, optional): Pixels of this label don't count. Defaults to 255.

        Returns:
            Tensor: The loss, a scalar; 0 if all pixels are ignored.

        Raises:
            ValueError: If there is more than one logit map.
        """
        if logits.shape[1] != 1:
            raise ValueError(f'BCEDiceLoss needs one logit map, out_channels=1, got {logits.shape[1]}')
        logits = logits.squeeze(1)
        logits = logits.float() if logits.element_size() < 4 else logits
        valid = torch.ones_like(logits) if ignore_index is None else (target != ignore_index).to(logits.dtype)
        pixels = valid.sum().clamp(min=1)
        if weight is not None:
            valid = valid * weight
        target = (target == 1).to(logits.dtype)
        bce = F.binary_cross_entropy_with_logits(logits, target, weight=valid, reduction='sum') / pixels

        probability = logits.sigmoid()
        overlap = (valid * probability * target).sum((1, 2))
        dice = (2 * overlap + SMOOTH) / ((valid * (probability + target)).sum((1, 2)) + SMOOTH)
        return self.bce_weight * bce + self.dice_weight * (1 - dice).mean()
