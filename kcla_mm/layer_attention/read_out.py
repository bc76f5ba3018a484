"""The read-out of KCLA by few passes over the maps, with a backward pass of its own."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from .base import without_autocast

is_compiling = getattr(torch.compiler, 'is_compiling', None) or torch._utils.is_compiling  # the latter in PyTorch 2.1


def is_lean(norm, x):
    """Whether :func:`read_out` and `ReadOut` can do what ``norm`` does on maps such as x: only a BatchNorm's work.

    Compilers and exporters get plain operations, which they fuse in their own way.
    """
    return (type(norm) is nn.BatchNorm2d and norm.running_mean is not None and norm.momentum is not None
            and x.numel() > x.shape[1]  # the norm itself says that one value has no variance
            and not (is_compiling() or torch.jit.is_tracing()))


def read_out(x, mean, weight, scale, norm):
    """What `ReadOut` computes in eval mode, without gradients: a convolution and one pass."""
    slope = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    shift = norm.bias - norm.running_mean * slope
    slope = scale * slope
    with without_autocast(x.device):
        if mean.device.type == 'cpu' and mean.is_contiguous() and mean.dtype == slope.dtype:
            # With samples as groups, each with filters of its own, the convolution does all but the last pass.
            attention = F.conv2d(mean.flatten(0, 1)[None], (slope[..., None, None, None] * weight).flatten(0, 1),
                                 shift.expand_as(scale).flatten(), padding=1, groups=slope.numel()).view_as(mean)
        else:
            attention = _conv(mean, weight).to(slope.dtype).mul_(_maps(slope)).add_(_maps(shift))
    return F.relu(attention, inplace=True).add_(x).to(x.dtype)


class ReadOut(torch.autograd.Function):
    """m = m + a (x - m); y = x + drop relu(BN(scale depthwise3x3(m))), for which of all maps m alone is kept.

    Autograd would keep three more: the convolution's output, its gated copy and the normalisation's output. Here the
    backward pass makes the convolution again, and from it the ReLU's mask. Gate, normalisation and drop path are one
    slope and one shift for each sample and channel.

    Args:
        x (Tensor): Output of the block, (N, C, H, W).
        memory (Tensor, optional): The depth memory m so far, of x's shape and dtype. None in the first block: m = x.
        update (Tensor, optional): a, (N, C), float32 at least; None in the first block.
        weight (Tensor): The convolution's, (C, 1, 3, 3).
        scale (Tensor): The gate of each channel, (N, C), float32 at least.
        norm_weight, norm_bias (Tensor): (C,).
        drop (Tensor, optional): What stochastic depth multiplies each sample with, (N, 1), not negative.
        norm (nn.BatchNorm2d): Its statistics are used in eval mode, and brought up to date in training.
        steps (tuple[Tensor]): What ``memory`` was made of, if the backward pass is to make it again: see `DepthMemory`.

    Returns:
        tuple: y, and the new m (None in the first block).
    """

    @staticmethod
    def forward(ctx, x, memory, update, weight, scale, norm_weight, norm_bias, drop, norm, steps):
        with without_autocast(x.device):
            mean = x if memory is None else torch.lerp(memory, x, _maps(update).to(x.dtype))
            value = _conv(mean, weight)
            if norm.training:
                averages = value.mean((2, 3), dtype=scale.dtype)
                value = value.to(scale.dtype).sub_(_maps(averages))  # variances of centred values don't cancel out
                variances = torch.linalg.vector_norm(value, dim=(2, 3)).square() / value[0, 0].numel()
                average = (scale * averages).mean(0)
                variance = (scale.square() * variances + (scale * averages - average).square()).mean(0)
                _update(norm, average, variance, value.numel() // len(weight))
            else:
                averages = variances = scale.new_zeros(())
                average, variance = norm.running_mean, norm.running_var
            deviation = torch.sqrt(variance + norm.eps)
            norm_slope = norm_weight / deviation
            slope, shift = scale * norm_slope, norm_bias - average * norm_slope
            if drop is not None:
                slope, shift = drop * slope, drop * shift
            y = value.to(slope.dtype).mul_(_maps(slope)).add_(_maps(slope * averages + shift))
            y = F.relu(y, inplace=True).add_(x).to(x.dtype)
        ctx.training = norm.training
        ctx.set_materialize_grads(False)
        kept = (None, None) if steps else (memory, mean)
        ctx.save_for_backward(x, update, weight, scale, norm_weight, norm_bias, drop, averages, variances, average,
                              deviation, slope, shift, *kept, *steps)
        return y, None if memory is None else mean

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_mean):
        (x, update, weight, scale, norm_weight, norm_bias, drop, averages, variances, average, deviation, slope, shift,
         memory, mean, *steps) = ctx.saved_tensors
        if steps:
            memory = _replay(steps)
            mean = torch.lerp(memory, x, _maps(update).to(x.dtype))
        grad = torch.zeros_like(mean) if grad is None else grad
        with without_autocast(grad.device):
            value = _conv(mean, weight)
            attention = (value * _maps(slope)).add_(_maps(shift)).to(value.dtype)
            grad_relu = torch.ops.aten.threshold_backward(grad, attention, 0)
            total = grad_relu.sum((2, 3), dtype=scale.dtype)
            dot = torch.mul(grad_relu, value, out=attention).sum((2, 3), dtype=scale.dtype)
            if drop is not None:
                total, dot = drop * total, drop * dot
            grad_norm_bias = total.sum(0)
            grad_norm_weight = ((scale * dot - average * total) / deviation).sum(0)
            norm_slope = norm_weight / deviation
            grad_scale = norm_slope * dot
            grad_value = grad_relu.mul_(_maps(slope))
            if ctx.training:
                # The batch's average and variance depend on every gated value g, by constant + linear * g.
                elements = value[0, 0].numel()
                linear = -norm_slope * grad_norm_weight / (deviation * (elements * len(value)))
                constant = -norm_slope * grad_norm_bias / (elements * len(value)) - linear * average
                grad_scale += elements * (constant * averages + linear * scale * (variances + averages.square()))
                grad_value.addcmul_(value, _maps(linear * scale.square()).to(value.dtype)).add_(_maps(constant * scale))
            grad_m, grad_weight, _ = torch.ops.aten.convolution_backward(
                grad_value, mean, weight.to(mean.dtype), None, [1, 1], [1, 1], [1, 1], False, [0, 0], len(weight),
                [True, True, False])
            if grad_mean is not None:
                grad_m += grad_mean
            grad_memory = grad_update = None
            if memory is None:
                grad = grad + grad_m
            else:
                grad_update = torch.sub(x, memory, out=grad_value).mul_(grad_m).sum((2, 3), dtype=scale.dtype)
                grad = torch.addcmul(grad, grad_m, _maps(update).to(grad.dtype), out=value)
                grad_memory = grad_m.mul_(_maps(1 - update))
        return (grad, grad_memory, grad_update, grad_weight.to(weight.dtype), grad_scale,
                grad_norm_weight.to(norm_weight.dtype), grad_norm_bias.to(norm_bias.dtype), None, None, None)


def _update(norm, average, variance, count):
    """Brings running statistics up to date as `nn.BatchNorm2d` does."""
    norm.num_batches_tracked.add_(1)
    norm.running_mean.lerp_(average.to(norm.running_mean.dtype), norm.momentum)
    norm.running_var.lerp_((variance * (count / max(count - 1, 1))).to(norm.running_var.dtype), norm.momentum)


def _replay(steps):
    """The depth memory that steps lead to."""
    mean, *rest = steps
    for x, update in zip(rest[::2], rest[1::2]):
        mean = torch.lerp(mean, x, _maps(update).to(x.dtype))
    return mean


def _conv(mean, weight):
    return F.conv2d(mean, weight.to(mean.dtype), padding=1, groups=len(weight))


def _maps(numbers):
    """Numbers, (N, C) or (C,), that broadcast to maps."""
    return numbers[..., None, None]
